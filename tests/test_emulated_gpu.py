"""An emulated GPU: runs on it equal the CPU's, and wait as often as docs/performance.md says."""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.types import finalize
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.backend import LossFn
from nemorl.parallel.config import TrainerConfig
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.algorithms import policy_loss, sft
from nemorl.runtime.config.grpo import ClippedLoss, GRPOConfig, GSPOLoss, KLConfig, OffPolicyConfig
from nemorl.runtime.engines.weights import WeightSender
from nemorl.runtime.watch.callbacks import Callback
from tests.emulated_gpu import NAME, Waits, counted, emulated, gpu
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.parity.cases import QUICK, Case
from tests.parallel.parity.compare import verdict
from tests.parallel.parity.run import chunks, run_chunk
from tests.parallel.varlen import used_on_cpus
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.runtime.runs import addition_rows, grpo_config, numbers, sft_config, start
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("emulated")  # once torch has the device it keeps it
ROOT = Path(__file__).parent.parent


def test_a_receipt_of_weights_is_one_read_of_the_device():
    """However many weights and replicas there are."""
    options = {"places": {}, "expected": {}, "dtype": torch.bfloat16}
    with emulated() as waits:
        weights = [(f"w{i}", torch.ones(8, i + 1, device=NAME)) for i in range(20)]
        sender, sent = WeightSender(actors=dict.fromkeys(range(3)), **options), {}
        cast = list(sender._noted(weights, sent))
        assert len(cast) == len(sent) == 20 and waits.total == 0
        receipt = sender._receipt(sent)
        assert waits.total == 1, waits.places
    assert set(receipt.wrong) == {0, 1, 2}


STEP = "an optimizer step, with its metrics"


def bound(what: str) -> int:
    """The number of waits that docs/performance.md promises."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(what)} \| (\d+) ", text, re.MULTILINE)
    assert found, what
    return int(found[1])


class TestTheDevice:
    """It must catch what it is for."""

    def test_it_computes_and_refuses_to_mix_devices(self):
        with emulated():
            ours = torch.arange(6.0, device=NAME).view(2, 3)
            assert (ours @ ours.t()).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]
            assert (ours * torch.tensor(2.0)).sum().item() == 30  # as on CUDA
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                ours + torch.ones(2, 3)

    @pytest.mark.parametrize(
        "what",
        [
            "cpu[index]",
            "ours.index_put((index,), cpu[:2])",
            "torch.cat([ours, cpu])",
            "torch.where(cpu > 1, ours, 0.0)",
            "ours.copy_(ours + cpu)",
        ],
    )
    def test_it_refuses_tensors_of_both_devices(self, what: str):
        cpu = torch.arange(3.0)
        with emulated():
            ours = torch.arange(3.0, device=NAME)
            names = {"torch": torch, "ours": ours, "cpu": cpu, "index": ours[:2].long()}
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                eval(what, names)

    @pytest.mark.parametrize(
        ("what", "count"),
        {
            "ours.sum().item()": 1,
            "ours[ours > 1]": 1,
            "ours[[0, 1]]": 1,
            "ours.cpu()": 1,
            "torch.ones(3, device=NAME).repeat_interleave(ours.long())": 1,
            "torch.ones(3, device=NAME).repeat_interleave(ours.long(), output_size=3)": 0,
            "torch.get_device_module(NAME).current_stream().synchronize()": 1,
            "ours * torch.tensor(2.0)": 0,
            "torch.ones(3).to(NAME, non_blocking=True)": 1,
            "torch.ones(3).pin_memory().to(NAME)": 1,
            "torch.ones(3).pin_memory().to(NAME, non_blocking=True)": 0,
            "ours.to('cpu', non_blocking=True)": 1,
            "ours.index_select(0, ours.long())": 0,
        }.items(),
    )
    def test_it_counts_waits(self, what: str, count: int):
        with emulated() as waits:
            ours = torch.arange(3.0, device=NAME)
            eval(what, {"torch": torch, "ours": ours, "NAME": NAME})
        assert waits.total == count, waits.found

    def test_it_has_autocast(self):
        with emulated():
            ours = torch.nn.Parameter(torch.ones(4, 4).to(NAME))
            with torch.autocast(NAME, dtype=torch.bfloat16):
                assert (ours @ ours).dtype == torch.bfloat16
                assert torch.nn.functional.linear(ours, ours).dtype == torch.bfloat16


def on(device: str) -> Any:
    return emulated() if device == NAME else nullcontext()


FLOAT32 = {"param_dtype": "float32"}
EPS = 1e-4
"""Of Adam, which with less makes steps of a gradient's rounding, another on each type of CPU."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "all lengths in one call, packed": {
        **{"trainer": {"sequence_packing": True}, "varlen": True},
        "plan": {**FLOAT32, "activation_checkpointing": "full"},
    },
    "LoRA": {"lora": {"rank": 4, "alpha": 8.0}},
    "foreach": {"optimizer": {"eps": EPS, "implementation": "foreach"}},
}
OFTEN = list(LAYOUTS)[:2]


def trained(device: str, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    options = {"plan": FLOAT32, "optimizer": {"eps": EPS}, **layout}
    options["trainer"] = {"device": device, **options.get("trainer", {})}
    kernel: Any = used_on_cpus() if options.pop("varlen", False) else nullcontext([None])
    with on(device), kernel as calls:
        backend = set_up(tiny_model(scale=2.0), keep_reference=True, **options)
        found: dict[str, Any] = {"metrics": [], "logprobs": []}
        for number in range(3):
            batch = random_batch([9, 2, 30, 17, 5, 12, 30, 8], seed=number)
            if number == 1:
                backend.save_checkpoint(folder / device, background=True)
                backend.wait_for_checkpoint()
            if number == 2:
                with counted() as moving:
                    backend.offload()
                    backend.get_logprobs(batch)
                backend.load_checkpoint(folder / device)
            with counted() as step:
                found["metrics"].append(numbers(finalize(backend.train_step(batch, nll_loss))))
            with counted() as scoring:
                found["logprobs"].append(backend.get_logprobs(batch).values)
            if device == NAME:
                scored = bound("`get_logprobs`, of a whole batch")
                assert step.total == bound(STEP), step.places
                assert scoring.total == scored, scoring.places
        if device == NAME:
            away = bound("offloading the trainer, and back")
            assert moving.total == away + scored, moving.places
        found["logprobs"].append(backend.get_reference_logprobs(batch).values)
        found["weights"] = {name: value.cpu().clone() for name, value in backend.weights()}
        backend.shutdown()
        assert calls
    return found


@pytest.mark.parametrize(
    "layout", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_training_equals_the_cpus_and_waits_as_promised(layout: str, tmp_path: Path):
    cpu, ours = (trained(device, tmp_path, LAYOUTS[layout]) for device in ("cpu", NAME))
    torch.testing.assert_close(ours, cpu, rtol=2e-5, atol=2e-5)


GRPO = {
    "grpo": GRPOConfig(loss=ClippedLoss(dual_clip=3.0), off_policy=OffPolicyConfig(mode="mask")),
    "gspo": GRPOConfig(loss=GSPOLoss(token_gradient=True), entropy_coef=0.1),
    "KL": GRPOConfig(kl=KLConfig(coef=0.1), off_policy=OffPolicyConfig(mode="truncate")),
}


def batch_and_loss(algorithm: str, size: int) -> tuple[TokenBatch, LossFn]:
    batch = random_batch([*islice(cycle([9, 14, 30, 17, 12]), size)])
    if algorithm == "sft":
        return batch, sft.loss_fn
    names = ("advantages", "prev_logprobs", "reference_logprobs", "generation_logprobs")
    given = {name: torch.randn(batch.input_ids.shape) for name in names}
    kind = LogprobKind(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    return replace(batch, logprob_kind=kind, **given), policy_loss.make_loss(GRPO[algorithm])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("algorithm", ["sft", *GRPO])
def test_the_host_waits_for_nothing_between_microbatches(algorithm: str, packed: bool):
    forwards, waits = [], []
    rows = {"sequence_packing": True, "packed_row_tokens": 64} if packed else {}
    with emulated():
        trainer = {"device": NAME, "train_micro_batch_size": 1, **rows}
        backend = set_up(tiny_model(), trainer=trainer, plan=FLOAT32)
        embedding = backend.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda *_: forwards.append(len(waits)))
        for size in (2, 10) if packed else (1, 3):
            batch, loss_fn = batch_and_loss(algorithm, size)
            with counted() as found:
                finalize(backend.train_step(batch, loss_fn))
            waits.append(found)
    few, many = forwards.count(0), forwards.count(1)
    assert many > few and waits[0].total == bound(STEP)
    more = (many - few) * bound("a microbatch, of any loss")
    assert waits[1].total - waits[0].total == more, waits[1].places


class StepWaits(Callback):
    """The waits of each step, from which checkpoints are left out, and its passes of the engine."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes
        self.found: list[tuple[Waits, int]] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        gpu.waits = Waits()
        self.passes.clear()

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.found.append((gpu.waits, len(self.passes)))
        gpu.waits = Waits()


def run(make: Any, device: str, folder: Path, passes: list[Any]) -> tuple[Any, StepWaits]:
    waits = StepWaits(passes)
    config = make(
        folder,
        steps=4,
        run={"save_period": 2, "val_period": 2, "export": True},
        trainer=TrainerConfig(device=device),
        parallel=ParallelPlan(param_dtype="float32"),
    )
    with on(device):
        return start(config, validation=addition_rows(8), callbacks=[waits]), waits


@pytest.mark.parametrize("make", [grpo_config, pytest.param(sft_config, marks=pytest.mark.slow)])
def test_a_run_equals_the_cpus(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    passes, draw = [], TorchGenerationBackend._draw

    def watched(engine: TorchGenerationBackend, work: Any) -> torch.Tensor:
        passes.append(work)
        return draw(engine, work)

    cpu, _ = run(make, "cpu", tmp_path / "cpu", [])
    monkeypatch.setattr(TorchGenerationBackend, "_draw", watched)
    ours, waits = run(make, NAME, tmp_path / "ours", passes)
    for mine, theirs in zip(ours.history, cpu.history, strict=True):
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=1e-4, abs=1e-5)
    exported = [load_causal_lm(str(result.paths.hf)).state_dict() for result in (ours, cpu)]
    # AdamW moves a weight without a gradient as far as rounding says.
    torch.testing.assert_close(*exported, rtol=1e-4, atol=2e-4)
    for step in (0, 2):  # without validation
        found, sampled = waits.found[step]
        assert (sampled > 0) == (make is grpo_config)
        scored = bound("`get_logprobs`, of a whole batch") * (sampled > 0)
        token = bound("a pass of the embedded engine: a token of all sequences")
        assert found.total == bound(STEP) + scored + sampled * token, found.places


def waits_of_ranks(backend_name: str, folder: Path, plan: dict[str, Any]) -> list[int]:
    trainer, found = {"device": NAME, "train_micro_batch_size": 2}, []
    with emulated():
        make = MegatronBackend if backend_name == "megatron" else None
        plan = {**FLOAT32, **plan}
        backend: Any = set_up(None, folder, trainer=trainer, plan=plan, make=make)
        for lengths in ([9, 2, 30, 17], [9, 2, 30, 17] * 3):
            with counted() as waits:
                finalize(backend.train_step(random_batch(lengths), nll_loss))
            found.append(waits.total)
        backend.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend_name", "plan", "hops"),
    # megatron-core's stages send each other shapes
    [("dtensor", {"tp": 2}, 0), ("megatron", {"pp": 2}, 2)],
)
def test_ranks_wait_as_promised(backend_name: str, plan: dict, hops: int, tmp_path: Path):
    tiny_model(scale=2.0).save_pretrained(tmp_path)
    args = backend_name, tmp_path, plan
    found = run_ranks(2, waits_of_ranks, *args, process_group=False)
    part = bound("a microbatch, of any loss") + hops
    steps = [bound(STEP), bound("the same, on a rank that sends metrics")]
    assert sorted(first for first, _ in found) == [step + 2 * part for step in steps]
    assert all(second == first + 4 * part for first, second in found)


CASES = [each for each in QUICK if each.ranks in (1, 2) and not each.compile]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", chunks(CASES), ids=lambda chunk: f"with {chunk[0].plan}")
def test_the_parity_of_plans(chunk: list[Case]):
    for case, found in zip(chunk, run_chunk(chunk, NAME), strict=True):
        assert verdict(case, found) == (True, ""), case
