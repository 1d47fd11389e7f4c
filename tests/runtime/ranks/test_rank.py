"""What a rank does with a call, without a process for it."""

import threading
import time

import pytest
import torch

from nemorl.parallel.config import BackendConfig
from nemorl.runtime.ranks.rank import IDLE, TrainingRank, WeightExport
from tests.runtime.ranks.backends import Summing

SIZES = {"a": 10, "b": 20, "c": 300, "d": 1, "e": 40, "empty": 0}
"""Elements of float32; a bucket holds 256 bytes."""


def weights(log: list[str] | None = None):
    for index, (name, size) in enumerate(SIZES.items()):
        if log is not None:
            log.append(name)
        yield name, torch.full((size,), float(index))


def exported(transport: str | None, packers: list | None = None) -> list:
    export, found = (
        WeightExport(weights(), [] if packers is None else packers, transport, bucket_bytes=256),
        [],
    )
    while (bucket := export.next()) is not None:
        found.append(
            bucket
            if transport is None
            else [(name, tensor.clone()) for name, tensor in bucket.tensors()]
        )
    return found


@pytest.mark.parametrize("transport", ["shared_memory", "direct"])
def test_buckets_hold_everything_in_order_and_are_cut_alike_everywhere(transport):
    buckets = exported(transport)
    assert [[name for name, _ in bucket] for bucket in buckets] == [
        ["a", "b"],
        ["c"],
        ["d", "e", "empty"],
    ]
    assert [tensor.tolist() for bucket in buckets for _, tensor in bucket] == [
        tensor.tolist() for _, tensor in weights()
    ]
    assert exported(None) == [True, True, True], "other ranks drop theirs at the same places"


def test_no_more_than_a_bucket_and_a_tensor_is_gathered_ahead():
    log: list[str] = []
    WeightExport(weights(log), [], "direct", bucket_bytes=256).next()
    assert log == ["a", "b", "c"]


def test_a_bucket_stays_as_it_is_while_the_next_is_filled():
    export = WeightExport(weights(), [], "shared_memory", bucket_bytes=256)
    first = export.next()
    before = [tensor.tolist() for _, tensor in first.tensors()]
    second = export.next()
    assert [tensor.tolist() for _, tensor in first.tensors()] == before
    assert second.tensors()[0][1].tolist() == [2.0] * 300


def test_memory_is_used_again():
    packers: list = []
    exported("shared_memory", packers)
    assert len(packers) == 2
    before = {id(packer) for packer in packers if packer.capacity >= 1216}
    exported("shared_memory", packers)
    assert len(packers) == 2 and before & {id(packer) for packer in packers}


class Loose(Summing):
    """By itself: no process group."""

    def setup(self, config):
        self.rank = 0

    def export_weights(self):
        yield from weights()

    def wait(self, event):
        assert event.wait(20)


def made(transport: str = "direct", rank: int = 0) -> TrainingRank:
    host = TrainingRank(Loose, rank, transport=transport)
    assert host.perform("setup", (BackendConfig(),), {}).kind == "value"
    return host


def test_exports_may_be_interleaved_and_dropped():
    host = made("shared_memory")
    for export in (0, 1):
        assert host.perform("export_open", (export, [], {}), {}).kind == "value"
    for export in (0, 1):
        assert [
            name for name, _ in host.perform("export_next", (export,), {}).value.tensors()
        ] == list(SIZES)
    assert [host.perform("export_next", (export,), {}).value for export in (0, 1)] == [None, None]
    host.perform("export_open", (2, [0, 1], {}), {})
    answer = host.perform("export_next", (1,), {})
    assert answer.kind == "error" and len(host._exports) == 1 and len(host._packers) <= 2


def test_only_rank_zero_tells_its_results():
    assert made().perform("get_logprobs", (7,), {}).value == 7
    assert made(rank=1).perform("get_logprobs", (7,), {}).value is None


def test_it_tells_what_it_is_doing():
    host, release = made(), threading.Event()
    assert (host.status().phase, host.status().frames) == (IDLE, ())
    thread = threading.Thread(target=host.perform, args=("wait", (release,), {}))
    thread.start()
    time.sleep(0.3)
    status = host.status()
    release.set()
    thread.join()
    assert status.phase == "wait" and 0.2 < status.seconds < 10
    assert "threading.py" in status.frames[0] and any(
        "training/test_rank.py" in frame and frame.endswith(" wait") for frame in status.frames
    )
    assert host.status().phase == IDLE


def test_errors_are_kept_apart_from_results(capfd):
    host = made("shared_memory")
    answer = host.perform("nothing", (), {})
    assert (
        answer.kind == "error"
        and answer.value["builtin"] == "AttributeError"
        and answer.error is None
    )
    assert "AttributeError" in capfd.readouterr().err, "the log has the traceback"
    answer = made("direct").perform("nothing", (), {})
    assert isinstance(answer.error, AttributeError) and capfd.readouterr().err == "", (
        "it will be raised in this very process"
    )
    host.perform("shutdown", (), {})
    assert "call setup() first" in host.perform("get_logprobs", (7,), {}).value["message"]
