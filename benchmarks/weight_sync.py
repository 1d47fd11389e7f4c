"""How fast weights get from a trainer to a vLLM engine, a Ray actor on the same machine, against a
plain copy of the same bytes in memory, in turn.

    python benchmarks/weight_sync.py [--megabytes 10 100 1000] [--no-engine] [--small]

transport: from the trainer's tensors until another process has them as tensors. sync: until an
engine computes with them; on a CPU vLLM repacks each matrix, whoever brings the weights. receipt:
its checksums, which sender and engine compute. first token: from the end of a train step,
through the sync, until the engine has answered with a token.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from common import command, median_ratio, model_config, quiet, synchronize

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
    device: Literal["cpu", "cuda"] = "cpu"
    """Of the trainer's weights; an engine on the same GPU takes them by CUDA IPC."""
    settings: dict[str, Any] = field(default_factory=dict)
    """More settings of generation."""


SIZES = {10: (256, 2), 100: (896, 2), 1000: (2048, 4)}
"""Width and layers of a Qwen2 of about so many megabytes."""


def config_of(megabytes: int) -> Any:
    hidden, layers = SIZES[megabytes]
    return model_config(
        vocab_size=1024,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    )


class Readable:
    """The least that a receiver can do: it has the weights as tensors."""

    def call(self, method: str, info: Any = None) -> dict[str, Any]:
        from nemorl.runtime.engines.weights import unpacked

        loads = method == "load_weights"
        assert not loads or all(tensor is not None for _, tensor in unpacked(info["bucket"]))
        return {}


class Trainer:
    """A model whose step has just ended."""

    def __init__(self, model: Any) -> None:
        self.model, self.step = model, 0

    def weights(self) -> Any:
        from nemorl.models.adapters import merged_tensors

        return merged_tensors(self.model)


def seconds(call: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def measure(megabytes: int, options: Options) -> tuple[int, dict[str, list[float]]]:
    """The bytes of the weights, and the seconds of each way in each round."""
    import ray
    import torch
    from transformers import AutoModelForCausalLM

    from nemorl import SamplingParams
    from nemorl.models.tensor_files import tensor_checksum
    from nemorl.rollout.config import GenerationConfig
    from nemorl.rollout.generation import Weights
    from nemorl.rollout.wrapped import blocking
    from nemorl.runtime.engines.backend import VLLMGenerationBackend
    from nemorl.runtime.engines.weights import (
        WeightSender,
        expected_weights,
        own_place,
        sync_weights,
    )

    model = AutoModelForCausalLM.from_config(config_of(megabytes)).to(options.device)
    weights = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    copies = [torch.rand_like(tensor) for _, tensor in weights]
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    expected, stored = expected_weights(model.config.to_json_string())
    sender = WeightSender(
        actors={0: ray.remote(Readable).options(num_cpus=0).remote()},
        places={0: own_place()},
        expected=expected,
        stored=stored,
        dtype=torch.float32,
        transport="object_store",
    )
    trainer: Any = Trainer(model)
    generator = VLLMGenerationBackend(model=model)
    if options.engine:
        cache = {"kv_cache_memory_bytes": 64 << 20}
        generator.setup(GenerationConfig(backend="vllm", engine=cache, **options.settings))
    params, source = SamplingParams(max_new_tokens=1, seed=0), Weights(version=-1, tensors=weights)

    def copy() -> None:
        for target, (_, tensor) in zip(copies, weights, strict=True):
            target.copy_(tensor)

    def receipt() -> None:
        torch.stack([tensor_checksum(tensor) for _, tensor in weights]).tolist()

    def first_token() -> None:
        sync_weights(trainer, generator)
        generator.generate([[5] * 16], params)

    times: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):  # the first is not counted
        trainer.step += 1
        round_ = {"copy": seconds(copy), "transport": seconds(lambda: sender(0, weights))}
        if options.engine:
            round_["sync"] = seconds(lambda: blocking(generator.update_weights(source)))
            round_["receipt"] = seconds(receipt)
            round_["first token"] = seconds(first_token)
        for name, value in round_.items() if number else ():
            times.setdefault(name, []).append(value)
    generator.shutdown()
    return num_bytes, times


def main(options: Options) -> None:
    quiet()
    os.environ["OMP_NUM_THREADS"] = "1"  # as replicas have it
    import torch

    from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster

    torch.set_num_threads(1)
    with RayVirtualCluster({"benchmark": [Bundle(cpus=1)]}, num_cpus=2):
        for megabytes in options.megabytes:
            num_bytes, times = measure(megabytes, options)
            print(f"{num_bytes / 1e6:.0f} MB of float32")
            for name, values in times.items():
                ratio = median_ratio(values, times["copy"])
                took = statistics.median(values)
                speed = f"{num_bytes / took / GIGA:6.2f} GB/s   ratio to the copy {ratio:.2f}"
                print(f"  {name:>11} {speed}   {took:.3f} s")


if __name__ == "__main__":
    command(main, Options, megabytes=(10,), rounds=1)
