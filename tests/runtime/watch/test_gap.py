"""The gap between sampler and trainer in whole runs."""

import json
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import nemorl
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run.registry import GENERATION_BACKENDS
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.alerts import GapWatch
from nemorl.runtime.watch.report import Gathered, sample_data
from tests.runtime.engines.shared import CACHE, shared_replicas
from tests.runtime.runs import grpo_config, lines, of_phase, samples_at, start
from tests.runtime.tiny import tiny_run


class Skewed(TorchGenerationBackend):
    """The embedded engine, but it reports wrong logprobs: of the weights of version v, off by log
    `factors[v]`, and `nats` more in some places.

    Greedy answers are left as they are, so that the probe before the first step finds nothing.
    """

    factors: ClassVar[dict[int, float]] = {}
    nats: ClassVar[dict[tuple[int, int], float]] = {}
    """(response of the batch, token) -> how much too high."""
    begun = 0
    """Responses since it was woken."""

    def wake(self) -> None:
        self.begun = 0
        super().wake()

    async def sample(self, prompt: Any, params: Any) -> Any:
        begin, self.begun = self.begun, self.begun + params.n
        completions = await super().sample(prompt, params)
        if params.temperature == 0:
            return completions
        shift = math.log(self.factors.get(self.policy_version, 1.0))

        def skewed(number: int, right: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(x + shift + self.nats.get((number, i), 0.0) for i, x in enumerate(right))

        found = enumerate(completions, start=begin)
        return [replace(c, logprobs=skewed(number, c.logprobs)) for number, c in found]


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> type[Skewed]:
    monkeypatch.setitem(GENERATION_BACKENDS, "skewed", Skewed)
    monkeypatch.setattr(Skewed, "factors", {})
    monkeypatch.setattr(Skewed, "nats", {})
    return Skewed


SKEWED = nemorl.GenerationConfig(backend="skewed", max_new_tokens=4)


FILTERED = {"temperature": 0.7, "top_p": 0.9}
SAMPLING = {
    "plain": {},
    "filtered": {**FILTERED, "top_k": 20},
    "vllm": {**FILTERED, "backend": "vllm", "engine": CACHE, "max_batch_size": 64},
}


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "filtered",
        pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]),
    ],
)
def test_in_float32_on_a_cpu_they_agree_to_4_digits(name: str, tmp_path: Path) -> None:
    """Also packed and in microbatches; and the sample log has what both say of each token."""
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32} if name == "vllm" else {}
    # With shared prompts trainer and sampler do the same sums, and agree to the bit.
    trainer = nemorl.TrainerConfig(
        device="cpu", sequence_packing=True, micro_batch_tokens=40, share_prompts=False
    )
    generation = nemorl.GenerationConfig(max_new_tokens=6, **SAMPLING[name])
    shared = shared_replicas() if name == "vllm" else nullcontext()
    with warnings.catch_warnings(), shared:
        warnings.filterwarnings("error", message=".*sampler and trainer disagree")
        config = grpo_config(tmp_path, steps=3, trainer=trainer, generation=generation)
        result = start(config, **sizes)
    trained = [line for line in of_phase(result, "train") if line["num_updates"]]
    assert trained
    for line in trained:
        assert 1 <= line["token_mult_prob_error"] <= line["token_mult_prob_error_max"] < 1 + 1e-4
        assert line["gen_kl_error"] + 1e-9 >= 0 and line["gen_kl_error_max"] < 1e-4
        assert line["generation_nonfinite_fraction"] == 0
    samples = [sample for step in (1, 2, 3) for sample in samples_at(tmp_path, step)]
    pairs = [(sample["trainer_logprobs"], sample["logprobs"]) for sample in samples]
    for (ours, theirs), sample in zip(pairs, samples, strict=True):
        assert len(ours) == len(sample["token_ids"]) and ours == pytest.approx(theirs, abs=1e-4)
    assert any(ours != theirs for ours, theirs in pairs), "two computations, not one told twice"


def test_the_worst_response_is_measured_and_the_worst_tokens_are_named(
    skewed: type[Skewed], tmp_path: Path
) -> None:
    skewed.nats = {(3, 1): 0.7, (3, 2): -1.5, (13, 0): 0.2}  # samples are 0 … 3 and 12 … 15
    packed = nemorl.TrainerConfig(device="cpu", sequence_packing=True, micro_batch_tokens=60)
    result = start(grpo_config(tmp_path, steps=1, generation=SKEWED, trainer=packed))
    (line,) = of_phase(result, "train")
    samples = samples_at(tmp_path, 1)
    lengths = [len(sample["token_ids"]) for sample in samples]
    assert line["token_mult_prob_error_max"] == pytest.approx(
        (math.exp(0.7) + math.exp(1.5) + lengths[3] - 2) / lengths[3], rel=1e-4
    )
    found = samples[3]["worst_tokens"]
    assert [token["position"] for token in found[:2]] == [2, 1] and len(found) == 3
    assert found[0]["trainer_logprob"] - found[0]["logprob"] == pytest.approx(1.5, abs=1e-4)
    assert found[0]["token"] == samples[3]["response"][2]
    shown = sample_data(Gathered(tmp_path))["steps"][1]
    assert shown[3]["gaps"][1:3] == pytest.approx([-0.7, 1.5], abs=1e-3)
    assert shown[3]["chips"]["widest gap"].startswith("×4.48 in ")
    assert "widest gap" not in shown[0]["chips"]  # they agree


def test_looking_at_samples_changes_nothing(tmp_path: Path) -> None:
    """The run has the same bits without the forward pass for the sample log."""

    def numbers(count: int) -> list[tuple[float, float]]:
        lora = nemorl.LoRAConfig(rank=2, dropout=0.3)
        gap = nemorl.GapConfig(warn=None)  # dropout is a gap
        options = {"lora": lora, "gap": gap, "run": {"samples_per_step": count}}
        result = start(grpo_config(tmp_path / str(count), steps=3, **options))
        return [(line["loss"], line["grad_norm"]) for line in of_phase(result, "train")]

    assert numbers(0) == numbers(8)
    assert not (tmp_path / "0" / "samples").exists()


def stepped(watch: GapWatch, gaps: list[float]) -> None:
    for step, gap in enumerate(gaps, start=1):
        metrics = {"token_mult_prob_error": gap, "token_mult_prob_error_max": gap}
        watch.on_step_end(tiny_run(), step, {**metrics, "generation_nonfinite_fraction": 0.0})


def test_a_warning_at_first_and_when_it_has_doubled(tmp_path: Path) -> None:
    watch = GapWatch(nemorl.GapConfig(), RunDirectory(tmp_path))
    with pytest.warns(UserWarning, match="sampler and trainer disagree") as caught:
        stepped(watch, [1.0, 1.06, 1.11, 1.13, 1.0, 1.2])
    told = [str(warning.message) for warning in caught]
    assert [message.split(":")[0] for message in told] == ["step 2", "step 4"]
    for words in (
        "a factor of 1.06 on average and 1.06 in one response",
        "gap.warn is 1.05",
        str(tmp_path / "samples" / "steps_1-100.jsonl"),
        "bfloat16",
    ):
        assert words in told[0]


def test_a_sampler_without_logprobs_is_told_of(skewed: type[Skewed], tmp_path: Path) -> None:
    """Nothing is measured then, which must not pass for agreement."""
    skewed.factors = {0: math.nan, 1: math.nan}
    gap = nemorl.GapConfig(stop=2.0)
    with pytest.warns(UserWarning, match="step 1: the sampler has no finite logprob") as caught:
        start(grpo_config(tmp_path / "warned", steps=2, generation=SKEWED))
    assert len([warning for warning in caught if "finite logprob" in str(warning.message)]) == 1
    with pytest.raises(FloatingPointError, match="the sampler has no finite logprob"):
        start(grpo_config(tmp_path / "stopped", steps=2, generation=SKEWED, gap=gap))


def test_too_wide_a_gap_ends_the_run_in_order(skewed: type[Skewed], tmp_path: Path) -> None:
    """The step is recorded and saved."""
    skewed.factors = {4: 1.5}
    gap, run = nemorl.GapConfig(stop=1.3), {"save_period": 2}
    config = grpo_config(tmp_path, steps=6, generation=SKEWED, gap=gap, run=run)
    with pytest.raises(
        FloatingPointError, match=r"step 5: .* by a factor of 1\.5 on average .*gap\.stop is 1\.3"
    ) as caught:
        start(config)
    notes = " ".join(caught.value.__notes__)
    assert f"{tmp_path} has a checkpoint of step 5" in notes
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "failed"
    steps = [line["step"] for line in lines(tmp_path, "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5] and samples_at(tmp_path, 5)
    skewed.factors = {}
    resumed = start(replace(config, run=replace(config.run, resume=True)))
    assert [line["step"] for line in of_phase(resumed, "train")] == [*steps, 6]
