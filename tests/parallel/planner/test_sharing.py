"""What an engine gets of a GPU that it has in turns with a trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.parallel.backends import LIMITS, OwnLimits
from nemorl.parallel.plan import ParallelPlan, TrainingTraits
from nemorl.parallel.planner.memory import PlannedStep, engine_memory
from nemorl.parallel.planner.sharing import Sharing, engine_share, sharing, states_of
from tests.parallel.planner.plans import config_of, models, read_once, shown

__all__ = ["models"]
BYTES = st.integers(0, 10**12)


def step_of(models: Path, name: str, *, gpus: int = 1, **options: Any) -> PlannedStep:
    """A step with bfloat16 and the defaults of a run."""
    settings = {"generation__backend": "vllm", "seq_len": 2048, **options}
    config = config_of(models, name, gpus=gpus, **settings)
    shape = read_once(str(models / name))
    plan = ParallelPlan(dp_shard=gpus, param_dtype="bfloat16")
    return PlannedStep(shape, plan, config)


def shared(step: PlannedStep, card: float = 80e9, **options: Any) -> Sharing:
    options = {"can_offload": True, "can_empty": True, **options}
    return sharing(step, card=card, **options)


@given(
    card=st.integers(10**9, 10**12), kept=BYTES, more=BYTES, needed=BYTES, reserve=st.floats(0, 0.9)
)
def test_a_share_and_what_the_trainer_keeps_never_exceed_the_gpu(card, kept, more, needed, reserve):
    def share(kept: int) -> float | None:
        try:
            return engine_share(card, kept=kept, needed=needed, reserve=reserve)
        except ValueError:
            return None

    found, less = share(kept), share(kept + more)
    assert less is None or (found is not None and less <= found)
    if found is None:
        assert kept + needed > card * (1 - reserve)
        return
    assert 0 <= found <= 1 and found * card + kept <= card * (1 - reserve) * (1 + 1e-9)
    assert found * card >= needed - card / 1000  # rounded down to thousandths


@given(
    card=st.floats(1e9, 2e11),
    gpus=st.sampled_from([1, 2, 8]),
    length=st.integers(1, 10**5),
    sequences=st.integers(1, 1000),
    asked=st.sampled_from([None, True, False]),
    can_offload=st.booleans(),
)
def test_both_have_room_while_they_are_active(
    models, card, gpus, length, sequences, asked, can_offload
):
    step = step_of(models, "7b", gpus=gpus, seq_len=length, max_batch_size=sequences)
    trainer = replace(step.work.trainer, offload_during_generation=asked)
    step = replace(step, work=replace(step.work, trainer=trainer))
    try:
        found = shared(step, card, can_offload=can_offload)
    except ValueError:
        return
    kept = states_of(step)
    states = kept.total - kept.gradients
    assert states + 4 * step.trained() == kept.total <= card, "the trainer, while engines sleep"
    assert found.share * card + found.kept <= 0.9 * card * (1 + 1e-9)
    assert found.share * card >= engine_memory(step, 1) - card / 1000
    assert found.offloads or found.kept == states
    if asked is None:
        assert found.offloads <= can_offload
        assert found.offloads == (can_offload and found.resident + found.wanted > 0.9 * card)
    else:
        assert found.offloads == asked


@pytest.mark.parametrize(
    ("options", "kept"), [({"lora__rank": 16}, 30.9e9), ({"gpus": 8}, 11.4e9)], ids=str
)
def test_defaults_work_on_cards_of_80_gb(options: dict[str, Any], kept: float, models: Path):
    found = shared(step_of(models, "7b", **options))
    assert not found.offloads and found.kept == pytest.approx(kept, rel=0.01)
    assert found.wanted / 80e9 < found.share < 0.9 - kept / 80e9


def test_offloading_is_on_where_both_do_not_fit_otherwise(models: Path):
    step = step_of(models, "7b", gpus=2)
    assert not shared(step).offloads
    long = step_of(models, "7b", gpus=2, seq_len=16384)
    found, without = shared(long), shared(long, can_offload=False)
    assert found.offloads and found.share > 0.85 and not without.offloads
    assert without.share == pytest.approx(0.328, abs=0.001)
    assert "offload_during_generation is on: the trainer's 45.7 GB and an engine's" in str(found)
    mine = step_of(models, "7b", gpus=2, seq_len=16384, offload_during_generation=False)
    assert shared(mine) == replace(without, chosen=False)


def test_engines_that_never_sleep_leave_all_that_training_takes(models: Path):
    step = step_of(models, "1.5b")
    found = shared(step, sleeps=False)
    assert found.kept == step.training_memory().total and not found.offloads
    assert found.share < shared(step).share


def test_a_trainer_that_empties_no_cache_keeps_its_peak(models: Path):
    step = step_of(models, "1.5b")
    emptied, kept = shared(step), shared(step, can_empty=False)
    assert emptied.kept == states_of(step).total - 4 * step.trained()
    assert kept.kept == kept.training == step.training_memory().total
    assert kept.share == pytest.approx(emptied.share - (kept.kept - emptied.kept) / 80e9, abs=1e-3)


def test_gradients_of_megatron_are_freed_and_its_states_offloaded(models: Path):
    plan = ParallelPlan(dp_shard=1, tp=4, param_dtype="bfloat16")
    steps = [
        replace(step_of(models, "7b", gpus=4, trainer__backend="megatron", **options), plan=plan)
        for options in ({}, {"seq_len": 16384}, {"offload_during_generation": True})
    ]
    states = states_of(steps[0])
    own = states.total - states.gradients
    assert states.gradients == 2 * states.parameters  # in float32
    roomy, tight, asked = map(shared, steps)
    assert not roomy.offloads and roomy.kept == tight.resident == own
    assert tight.offloads and asked.offloads and asked.kept == tight.kept < own / 10


def test_a_backend_of_yours_is_offloaded_where_it_has_the_method(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    class Stays:
        traits = TrainingTraits(shards="optimizer")

        def empty_cache(self) -> None: ...

    class Leaves(Stays):
        def offload(self, *, keep_weights: bool = False) -> None: ...

    found = {}
    for name, backend in (("stays", Stays), ("leaves", Leaves)):
        monkeypatch.setitem(LIMITS, name, OwnLimits(backend))
        options = {"trainer__backend": name, "tp": 4, "seq_len": 16384}
        said = shown(models, "7b", gpus=4, generation__backend="vllm", width=300, **options)
        found[name] = "trainer.offload_during_generation is on" in said, "host" in said
    assert found == {"stays": (False, False), "leaves": (True, True)}


def test_the_command_says_the_share(models: Path):
    options: dict[str, Any] = {"generation__backend": "vllm", "width": 300}
    said = shown(models, "1.5b", gpus=1, seq_len=2048, **options)
    assert "engines get 0.668 of each GPU's 80.0 GB (gpu_memory_utilization) beside 18.5 GB" in said
    assert "trainer.offload_during_generation is off" in said
