"""Receipts of tokens and support: whatever is exchanged between sampling and loss is found."""

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nemorl
from nemorl.data.batch import TokenBatch, take
from nemorl.data.packing import segments_apart
from nemorl.losses import policy
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.masks import token_mean_weights
from nemorl.losses.types import Sum
from nemorl.parallel.config import BackendConfig, ModelConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.collect import Rollouts, sampled_hashes
from nemorl.rollout.conversation import Conversation, Outcome, Turn
from nemorl.rollout.generation import Completion
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.algorithms.policy_loss import policy_loss
from nemorl.runtime.config.grpo import ReceiptsConfig
from nemorl.runtime.run.receipts import Receipts, TokenReceipt, with_receipts
from nemorl.runtime.run.registry import GENERATION_BACKENDS, TRAINING_BACKENDS
from nemorl.runtime.store.files import ReceiptError
from tests.ranks import run_ranks
from tests.runtime.runs import LOSS, grpo_config, of_phase, opened, start
from tests.tiny_models import tiny_model

PROMPTS = [[5, 6, 7], [8, 9, 10], [5, 6], [11, 12, 13, 14]]


def completion(draw: random.Random, length: int) -> Completion:
    return Completion(
        token_ids=tuple(draw.randint(2, 30) for _ in range(length)),
        logprobs=tuple(-draw.random() for _ in range(length)),
        finish_reason="stop",
        text="",
    )


def conversations() -> Rollouts:
    """Of one turn, of two, and of two of which the second rewrites the first one's prompt."""
    draw = random.Random(0)
    found = []
    for i, prompt in enumerate(PROMPTS):
        said = completion(draw, 6)
        turns = [Turn(prompt=prompt, completion=said)]
        if i == 2:
            after = [*prompt, *said.token_ids, 3, 4]
            turns.append(Turn(prompt=after, completion=completion(draw, 4)))
        if i == 3:
            turns.append(Turn(prompt=[*prompt[1:], 15], completion=completion(draw, 3)))
        place: Any = {"row": {}, "group": i // 2, "member": i % 2, "turns": tuple(turns)}
        found.append(Conversation(**place, outcome=Outcome(reward=1.0)))
    return Rollouts(conversations=found, rewards=torch.ones(4), kind=LogprobKind())


def exchanged(
    batch: TokenBatch, one: tuple[int, int], other: tuple[int, int], *names: str
) -> TokenBatch:
    found = {}
    for name in names:
        values = getattr(batch, name)
        found[name] = changed = values.clone()
        changed[one], changed[other] = values[other], values[one]
        assert not torch.equal(changed, values)
    return replace(batch, **found)


def prompts_exchanged(batch: TokenBatch) -> TokenBatch:
    ids = batch.input_ids.clone()
    ids[[0, 1], :3] = ids[[1, 0], :3]
    return replace(batch, input_ids=ids)


def position_moved(batch: TokenBatch) -> TokenBatch:
    positions = batch.position_ids.clone()
    positions[0, 8] -= 1
    return replace(batch, position_ids=positions)


def one_token_untrained(batch: TokenBatch) -> TokenBatch:
    mask = batch.loss_mask.clone()
    mask[1, 7] = False
    return replace(batch, loss_mask=mask)


IDS, LOGPROBS = "input_ids", "generation_logprobs"
FAULTS: dict[str, Callable[[TokenBatch], TokenBatch]] = {
    "none": lambda batch: batch,
    "token": lambda batch: exchanged(batch, (0, 5), (1, 5), IDS),
    "places": lambda batch: exchanged(batch, (0, 4), (0, 6), IDS, LOGPROBS),
    "position": position_moved,
    "all positions": lambda batch: replace(
        batch, position_ids=batch.position_ids + (batch.segment_ids > 0)
    ),
    "logprob": lambda batch: exchanged(batch, (0, 5), (1, 5), LOGPROBS),
    "rounding": lambda batch: replace(
        batch, generation_logprobs=batch.generation_logprobs.bfloat16().float()
    ),
    "prompt": prompts_exchanged,
    "mask": one_token_untrained,
    "a row twice": lambda batch: take(batch, [0, 0, 2, 3]),
}
PLANS = {
    "FSDP2": ("dtensor", {"dp_shard": 2}),
    "tp": ("dtensor", {"dp_shard": 1, "tp": 2}),
    "cp": ("dtensor", {"dp_shard": 1, "cp": 2}),
    "megatron tp": ("megatron", {"dp_shard": 1, "tp": 2}),
    "megatron pp": ("megatron", {"dp_shard": 1, "pp": 2}),
}


def proved(
    fault: str,
    packed: bool = False,
    folder: Path | None = None,
    plan: str = "",
    dtype: Any = None,
) -> dict[str, float] | str:
    """The metrics of a step on the conversations, or what the receipt says."""
    kind, degrees = PLANS.get(plan, ("dtensor", {}))
    model = tiny_model() if folder is None else None
    backend = MegatronBackend() if kind == "megatron" else DTensorBackend(model)
    backend.setup(
        BackendConfig(
            model=ModelConfig(path=str(folder or "")),
            trainer=TrainerConfig(device="cpu", sequence_packing=packed, micro_batch_tokens=32),
            optimizer=OptimizerConfig(lr=1e-3),
            parallel=ParallelPlan(**degrees, **({"param_dtype": dtype} if dtype else {})),
            total_steps=1,
        )
    )
    batch, receipt = conversations().to_batch(weights=token_mean_weights), TokenReceipt()
    receipt.expect(batch)
    batch = FAULTS[fault](batch)
    batch = replace(
        batch,
        loss_weights=token_mean_weights(batch.loss_mask),
        advantages=torch.where(batch.loss_mask, 1.0, 0.0),
    )
    loss_fn = with_receipts(policy_loss(policy.clipped))
    try:
        metrics = backend.train_step(segments_apart(batch)[0], loss_fn)
        logged = receipt.add(metrics)
        assert "loss" in logged and not [name for name in logged if "receipts" in name]
        return receipt.check(Receipts(ReceiptsConfig()), 7)
    except ReceiptError as error:
        return str(error)
    finally:
        backend.shutdown()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_sampling_and_loss_is_found(fault: str, packed: bool):
    check(proved(fault, packed), fault)


def check(found: dict[str, float] | str, fault: str) -> None:
    if fault == "none":
        assert isinstance(found, dict)
        assert found["receipts/tokens"] == 6 * 4 + 4 + 3 and found["receipts/tokens_unproved"] == 0
        return
    assert isinstance(found, str), found
    assert found.startswith("step 7: the receipt tokens does not hold: the loss was computed from")
    assert "31 were sampled" in found and "resume from the last checkpoint" in found


def on_ranks(folder: Path, plan: str, faults: list[str]) -> list[dict[str, float] | str]:
    return [proved(fault, packed, folder, plan) for fault in faults for packed in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_and_on_two_ranks(plan: str, tmp_path: Path):
    """Whichever way they divide rows, layers and tokens between them."""
    tiny_model().save_pretrained(tmp_path)
    faults = [*FAULTS] if plan == "FSDP2" else ["none", "token", "logprob"]
    found = run_ranks(2, on_ranks, tmp_path, plan, faults)
    for rank in found:
        for fault, said in zip([fault for fault in faults for _ in range(2)], rank, strict=True):
            check(said, fault)


def test_a_model_in_bfloat16_leaves_the_samplers_logprobs_as_they_are(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    check(proved("none", folder=tmp_path, dtype="bfloat16"), "none")


def test_the_sum_is_exact_however_many_parts_there_are():
    """In float64, too, in which parts come from other devices."""
    hashes = sampled_hashes(conversations().conversations)
    assert int((hashes > 0).sum()) == 6 + 6 + 10 + 9 and int(hashes.max()) < 2**32
    parts = [Sum(torch.tensor(float(2**32 - 1), dtype=torch.float64))] * 10_000
    total = parts[0]
    for each in parts[1:]:
        total = total + each
    assert int(total.finalize()) == 10_000 * (2**32 - 1)


class Exchanging(DTensorBackend):
    """Exchanges two of the sampler's logprobs before it trains."""

    def train_step(self, batch: Any, loss_fn: Any) -> Any:
        values = batch.generation_logprobs.clone()
        first, second = batch.loss_mask.nonzero()[:2].tolist()
        values[tuple(first)] += 0.125 + values[tuple(second)]
        return super().train_step(replace(batch, generation_logprobs=values), loss_fn)


@pytest.fixture
def exchanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINING_BACKENDS, "exchanging", Exchanging)


def test_a_run_stops_or_warns(exchanging: None, tmp_path: Path):
    trainer = nemorl.TrainerConfig(device="cpu", backend="exchanging")
    with pytest.raises(ReceiptError, match=r"^step 1: the receipt tokens does not hold: .*warn c"):
        start(grpo_config(tmp_path / "stops", steps=2, trainer=trainer))
    receipts = nemorl.ReceiptsConfig(on_failure="warn")
    config = grpo_config(tmp_path / "warns", steps=3, trainer=trainer, receipts=receipts)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lines = of_phase(start(config), "train")
    trained = [line for line in lines if line["num_updates"]]
    assert len(trained) == 3
    assert all(line["receipts/tokens"] == 0 for line in trained)
    assert all(line["receipts/tokens_unproved"] > 0 for line in trained)
    found = [str(w.message) for w in said if "the receipt tokens" in str(w.message)]
    assert [text.partition(":")[0] for text in found] == ["step 1", "step 2"], "not of the third"


@pytest.mark.parametrize("fault", ["none", "rounding", "all positions"])
def test_a_loop_of_one_s_own_is_proved(fault: str, tmp_path: Path):
    """In parts, several times, and by more than one model; what it leaves out is its own choice."""
    caught = pytest.raises(ReceiptError, match=r"^step 1: the receipt tokens does not hold")
    with nullcontext() if fault == "none" else caught, opened(grpo_config(tmp_path)) as run:
        prompts = run.prompts()
        run.backend("second", model=tiny_model(seed=1))
        for step in run.steps(2):
            batch = step.sample(prompts, count=2, n=2).to_batch(weights=token_mean_weights)
            batch = FAULTS[fault](replace(batch, advantages=batch.loss_weights))
            one = (batch.loss_mask.cumsum(-1) == 1) & batch.loss_mask
            step.train(take(batch, [2, 1]), LOSS)
            step.train(replace(batch, loss_weights=one.float()), LOSS)
            step.train(batch, LOSS, backend="second")
    if fault != "none":
        return
    assert all(line["receipts/tokens"] > 0 for line in of_phase(run.result, "train"))
    assert "second/loss" in run.result.metrics and run.result.metrics["reward"] >= 0


@pytest.mark.parametrize("how", ["train_step", "a batch"])
def test_a_run_says_once_that_tokens_are_not_proved(how: str, tmp_path: Path):
    with (
        pytest.warns(UserWarning, match="nothing proves") as said,
        opened(grpo_config(tmp_path, steps=2)) as run,
    ):
        prompts = run.prompts()
        for step in run.steps(2):
            batch = step.sample(prompts, count=2, n=2).to_batch(weights=token_mean_weights)
            batch = replace(batch, advantages=batch.loss_weights, sampled_hashes=None)
            if how == "a batch":
                step.train(batch, LOSS)
            else:
                step.log(run.trainer.train_step(batch, LOSS))
    assert sum("nothing proves" in str(each.message) for each in said) == 1


SIZES = {"train_global_batch_size": 8, "num_updates_per_batch": 2}
WAYS: dict[str, dict[str, Any]] = {
    "minibatches and passes": SIZES,
    "packed": {"trainer": TrainerConfig(device="cpu", sequence_packing=True)},
    "dynamic sampling": {"dynamic_sampling": True, "max_sampling_rounds": 1, **SIZES},
    "overlong": {"overlong": nemorl.OverlongConfig(filter=True)},
}


@pytest.mark.slow_cases(but=["dynamic sampling"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_left_out_for_a_reason_is_left_out_on_both_sides(way: str, tmp_path: Path):
    stops = nemorl.GenerationConfig(max_new_tokens=4, stop_token_ids=(*range(2, 12),))
    config = grpo_config(tmp_path, steps=3, **{"generation": stops, **WAYS[way]})
    lines = of_phase(start(config), "train")
    assert any(line["num_updates"] for line in lines)
    for line in lines:
        assert line["num_updates"] == 0 or line["receipts/tokens"] > 0
        assert line.get("receipts/tokens_unproved", 0) == 0
        passes = 2 if "num_updates_per_batch" in WAYS[way] else 1
        assert line.get("receipts/tokens", 0) <= passes * 24 * line["response_length"] + 1e-3


class OtherSupport(TorchGenerationBackend):
    """Draws from fewer tokens than it is asked to: from half of top_k."""

    async def sample(self, prompt: Any, params: Any) -> Any:
        fewer = replace(params, top_k=params.top_k // 2) if params.temperature else params
        return await super().sample(prompt, fewer)


def test_a_sampler_of_another_support_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(GENERATION_BACKENDS, "other", OtherSupport)
    generation = nemorl.GenerationConfig(max_new_tokens=8, top_k=12, backend="other")
    gap = nemorl.GapConfig(warn=None)
    with pytest.raises(ReceiptError, match="receipt support does not hold: the mean of π_trainer"):
        start(grpo_config(tmp_path / "a", steps=2, generation=generation, gap=gap))
    measured = nemorl.ReceiptsConfig(support=None)
    config = grpo_config(tmp_path / "b", steps=2, generation=generation, gap=gap, receipts=measured)
    ratios = [line["receipts/support_ratio"] for line in of_phase(start(config), "train")]
    assert all(0.5 < ratio < 0.97 for ratio in ratios)
    right = replace(config.generation, backend="torch")
    config = replace(config, generation=right, run=replace(config.run, dir=str(tmp_path / "c")))
    ratios = [line["receipts/support_ratio"] for line in of_phase(start(config), "train")]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-5)


@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_support_is_that_of_the_policy_before_the_step(proximal: Any, tmp_path: Path):
    """Updates on the step's own samples are no fault of the sampler."""
    config = grpo_config(
        tmp_path,
        steps=2,
        generation=nemorl.GenerationConfig(max_new_tokens=8, top_p=0.9),
        optimizer=nemorl.OptimizerConfig(lr=3e-2),
        loss=nemorl.ReinforceLoss(),
        off_policy=nemorl.OffPolicyConfig(mode="truncate", proximal=proximal),
        **{**SIZES, "num_updates_per_batch": 6},
    )
    for line in of_phase(start(config), "train"):
        assert line["receipts/support_ratio"] == pytest.approx(1, abs=1e-4)
        assert line["receipts/kl_from_1"] < 1e-6 and line["receipts/tokens_unproved"] == 0
