"""Whole runs whose ranks of megatron-core generate, and leave their memory to that."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.runtime.run import devices
from tests.parallel.offloaded import held_by_megatron as held
from tests.ranks import run_ranks
from tests.runtime.runs import addition_rows, digits, grpo_config, numbers, saved_model


def offloaded(folder: Path, offloads: bool) -> tuple[list[Any], list[dict[str, int]]]:
    """A run's numbers, and what this rank holds while it decodes."""
    found, decode = list[dict[str, int]](), MegatronBackend.decode

    def watched(self: MegatronBackend, order: Any) -> Any:
        if order.passes:
            found.append(held(self))
        return decode(self, order)

    config = replace(
        grpo_config(folder / f"offloads {offloads}", steps=2, kl=nemorl.KLConfig(coef=0.1)),
        model=nemorl.ModelConfig(path=str(folder / "model")),
        trainer=nemorl.TrainerConfig(backend="megatron", offload_during_generation=offloads),
        generation=nemorl.GenerationConfig(backend="megatron", max_new_tokens=4),
        parallel=nemorl.ParallelPlan(dp_shard=2, param_dtype="bfloat16"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_num_gpus", lambda *_: 2)  # each rank computes on its CPU
        patch.setattr(MegatronBackend, "decode", watched)
        result = nemorl.run(config, train=addition_rows(), reward=digits)
    return list(map(numbers, result.history)), found


@pytest.mark.slow
def test_ranks_that_generate_keep_nothing_but_their_parameters(tmp_path: Path):
    saved_model(tmp_path / "model")
    ours, others = (
        run_ranks(2, offloaded, tmp_path, offloads, process_group=False)
        for offloads in (True, False)
    )
    for (found, sizes), (expected, whole) in zip(ours, others, strict=True):
        assert found == expected and len(found) == 2 and len(sizes) > 2
        nothing = dict.fromkeys(sizes[0], 0)
        assert all(size == {**nothing, "parameters": size["parameters"]} for size in sizes)
        assert all(size["parameters"] and size["reference"] and size["spans"] for size in whole)
