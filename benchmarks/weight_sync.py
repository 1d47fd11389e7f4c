"""How fast weights get from a trainer to another process, against a plain copy of the same bytes in
memory, in turn.

    python benchmarks/weight_sync.py [--megabytes 10 100 1000] [--no-engine] [--no-first-token]

transport: from the trainer's tensors until the other process has them as tensors. sync: until a
vLLM engine in that process computes with them. On a CPU vLLM repacks each matrix, whoever brings
the weights: "load" is the engine's update from tensors that its own process has already (more than
any transport can give), "repack" the part of it in which oneDNN makes the packed matrices. first
token: from the end of a train step, through the sync, until one replica, a Ray actor, has answered
with a token.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tyro
from common import quiet

GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is sent."""

    megabytes: tuple[int, ...] = (10, 100, 1000)
    """Of parameters, in float32."""
    rounds: int = 7
    """Each one's turns; the median counts."""
    engine: bool = True
    """Also sync into a vLLM engine."""
    first_token: bool = True
    """Also measure a replica's first token after a sync."""


SIZES = {10: (256, 2), 100: (896, 2), 1000: (2048, 4)}
"""Width and layers of a Qwen2 of about so many megabytes."""


def config_of(megabytes: int) -> Any:
    from transformers import Qwen2Config

    hidden, layers = SIZES[megabytes]
    return Qwen2Config(
        vocab_size=1024, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, max_position_embeddings=256, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip


class Readable:
    """The least that a receiver can do: it has the weights as tensors."""

    def begin_weights(self) -> None: ...

    def load_weights(self, payload: Any) -> None:
        payload.tensors()

    def finish_weights(self) -> None: ...


class TimedEngine:
    """A vLLM engine, and what an update costs it when the weights are there already."""

    def __init__(self, megabytes: int) -> None:
        import torch
        from vllm import _custom_ops

        from nemorl.runtime.engines.engine import Engine
        from nemorl.runtime.engines.spec import EngineSpec

        config = config_of(megabytes).to_json_string().encode()
        self.engine = Engine(
            EngineSpec(files={"config.json": config}, vocabulary=None, dtype="float32", max_num_seqs=8, max_model_len=128,
                       engine={"kv_cache_memory_bytes": 64 << 20})
        )  # fmt: skip
        torch.set_num_threads(1)
        self.begin_weights, self.load_weights, self.finish_weights = (
            self.engine.begin_weights,
            self.engine.load_weights,
            self.engine.finish_weights,
        )
        self.repacking, pack = 0.0, _custom_ops.create_onednn_mm

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = pack(*args)
            self.repacking += time.perf_counter() - start
            return result

        _custom_ops.create_onednn_mm = timed
        self.weights = [(name, torch.rand(shape)) for name, shape in expected_of(megabytes).items()]

    def load_alone(self) -> tuple[float, float]:
        from nemorl.runtime.engines.weight_packers import DirectBucket

        self.repacking, start = 0.0, time.perf_counter()
        self.begin_weights()
        self.load_weights(DirectBucket(self.weights))
        self.finish_weights()
        return time.perf_counter() - start, self.repacking


def expected_of(megabytes: int) -> dict[str, tuple[int, ...]]:
    from nemorl.runtime.engines.weight_buckets import expected_weights

    return expected_weights(config_of(megabytes))


def serve(pipe: Any, megabytes: int, with_engine: bool) -> None:
    """The other process: answers calls in their order."""
    quiet()
    import torch

    torch.set_num_threads(1)
    target: Any = TimedEngine(megabytes) if with_engine else Readable()
    pipe.send(None)
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(target, method)(*args))


class Remote:
    """A receiver at the other end of a pipe."""

    def __init__(self, megabytes: int, with_engine: bool) -> None:
        self.pipe, theirs = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(
            target=serve, args=(theirs, megabytes, with_engine), daemon=True
        )
        self.process.start()
        self.pipe.recv()

    def start(self, method: str, *args: Any) -> "Remote":
        self.pipe.send((method, args))
        return self

    def result(self, timeout_s: float | None = None) -> Any:
        return self.pipe.recv()  # whoever waits, waits in the order of the calls

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(megabytes: int, options: Options) -> None:
    import torch

    from nemorl.runtime.engines.weight_transport import WeightSender

    torch.set_num_threads(1)
    shapes = expected_of(megabytes)
    weights = [(name, torch.rand(shape)) for name, shape in shapes.items()]
    copies = [torch.rand_like(tensor) for _, tensor in weights]
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    sender = WeightSender(shapes, dtype=torch.float32, transport="shared_memory")
    remote = Remote(megabytes, options.engine)
    readable = Remote(megabytes, False) if options.engine else remote
    times: dict[str, list[float]] = {
        "copy": [],
        "transport": [],
        "sync": [],
        "load": [],
        "repack": [],
    }
    for number in range(options.rounds + 1):  # the first is not counted
        round_: dict[str, float] = {}
        round_["copy"] = seconds(
            lambda: [copy.copy_(tensor) for copy, (_, tensor) in zip(copies, weights, strict=True)]
        )
        round_["transport"] = seconds(lambda: sender.send(weights, [readable]))
        if options.engine:
            round_["sync"] = seconds(lambda: sender.send(weights, [remote]))
            round_["load"], round_["repack"] = remote.start("load_alone").result()
        for name, value in round_.items():
            if number:
                times[name].append(value)
    for each in {remote, readable}:
        each.stop()
    print(f"{num_bytes / 1e6:.0f} MB of float32")
    copy = times["copy"]
    for name, values in times.items():
        if values:
            ratio = statistics.median(a / b for a, b in zip(copy, values, strict=True))
            print(
                f"  {name:>9} {num_bytes / statistics.median(values) / GIGA:6.2f} GB/s   ratio to"
                f" the copy {ratio:.2f}"
            )


class Trainer:
    """A model whose step has just ended."""

    def __init__(self, model: Any) -> None:
        self.model, self.step = model, 0

    def export_weights(self) -> Any:
        from nemorl.models.adapters import merged_tensors

        return merged_tensors(self.model)


def first_token(megabytes: int, options: Options) -> None:
    from transformers import AutoModelForCausalLM

    from nemorl import SamplingParams
    from nemorl.runtime.config.generation import GenerationConfig
    from nemorl.runtime.engines.backend import VLLMGenerationBackend
    from nemorl.runtime.run.weight_sync import sync_weights

    model = AutoModelForCausalLM.from_config(config_of(megabytes))
    trainer: Any = Trainer(model)
    generator = VLLMGenerationBackend(model=model)
    generator.setup(
        GenerationConfig(backend="vllm", num_replicas=1, engine={"kv_cache_memory_bytes": 64 << 20})
    )
    params, times = SamplingParams(max_new_tokens=1, seed=0), []
    for number in range(options.rounds + 1):
        generator.sleep()
        trainer.step += 1
        start = time.perf_counter()
        generator.wake()
        sync_weights(trainer, generator, version=number)
        generator.generate([[5] * 16], params)
        times.append(time.perf_counter() - start)
    generator.shutdown()
    print(f"  first token after {statistics.median(times[1:]):.3f} s")


def main(options: Options) -> None:
    quiet()
    from nemorl.runtime.engines.weights import HUGE_PAGES

    os.environ.update({"OMP_NUM_THREADS": "1", **HUGE_PAGES})  # as replicas have it
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(Path(folder))
        for megabytes in options.megabytes:
            measure(megabytes, options)
            if options.first_token:
                first_token(megabytes, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
