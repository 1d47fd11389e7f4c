"""GRPO over several turns: what a run trains on, by the formulas; tools; failures; resume."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import nemorl
from nemorl.rollout.config import RolloutConfig
from nemorl.runtime.config.grpo import GroupAdvantage
from tests.runtime.runs import addition_rows, chat_rows, grpo_config, of_phase, samples_at
from tests.tiny_models import tiny_model, tiny_tokenizer


class Digits:
    """Two turns; each is worth its share of digits, and the second fails for some sums."""

    def reset(self, prompt: str) -> None:
        self.turn, self.prompt = 0, prompt

    def step(self, response: str) -> nemorl.TurnResult:
        self.turn += 1
        if self.turn == 2 and self.prompt[0] in "04" and len(response) % 2:
            raise KeyError("lost")
        return nemorl.TurnResult(
            observation="+1=",
            reward=sum(c.isdigit() for c in response) / 4,
            done=self.turn == 2,
        )


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """The batches that a run trains on, and the conversations that it samples."""
    from nemorl.parallel.dtensor.backend import DTensorBackend
    from nemorl.runtime.run.loop import Step

    batches, rollouts = [], []
    train, sample = DTensorBackend.forward_backward, Step.sample

    def training(self, batch, loss_fn):
        batches.append(batch)
        return train(self, batch, loss_fn)

    def sampling(*args, **options):
        rollouts.append(sample(*args, **options))
        return rollouts[-1]

    monkeypatch.setattr(DTensorBackend, "forward_backward", training)
    monkeypatch.setattr(Step, "sample", sampling)
    return batches, rollouts


def run(config: Any, **options: Any) -> nemorl.TrainResult:
    given = {"train": addition_rows(), "reward": Digits, "tokenizer": tiny_tokenizer(), **options}
    return nemorl.run(config, model=tiny_model(scale=2.0), **given)


@pytest.mark.parametrize("level", ["conversation", "turn"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_run_trains_on_the_formulas_of_its_turns(tmp_path, monkeypatch, level, reduction):
    """Written out plainly for every token, over steps in which conversations fail."""
    batches, rollouts = watched(monkeypatch)
    rollout = RolloutConfig(discount=0.5)
    config = grpo_config(
        tmp_path,
        steps=3,
        advantage=GroupAdvantage(level=level),
        reduction=reduction,
        rollout=rollout,
    )
    result = run(config)
    assert len(batches) == len(rollouts) == 3 and any(each.failed for each in rollouts)
    for batch, found in zip(batches, rollouts, strict=True):
        told = [c.outcome.turn_rewards for c in found.conversations]
        values = [[r[0] + 0.5 * r[1], r[1]] for r in told]
        groups = found.group_id.tolist()
        for row, each in enumerate(found.conversations):
            peers = [v for v, group in zip(values, groups, strict=True) if group == each.group]
            expected, weights, place = [], [], 0
            for turn, (given, own) in enumerate(zip(each.turns, values[row], strict=True)):
                compared = [v[turn if level == "turn" else 0] for v in peers]
                mine = own if level == "turn" else values[row][0]
                mean = sum(compared) / len(compared)
                spread = sum((v - mean) ** 2 for v in compared) / max(len(compared) - 1, 1)
                a = (mine - mean) / (spread**0.5 + 1e-6) if len(set(compared)) > 1 else 0.0
                asked, said = len(given.prompt) - place, len(given.completion.token_ids)
                expected += [0.0] * asked + [a] * said
                total = sum(c.num_tokens for c in found.conversations)
                one = 1 / total
                if reduction == "sequence_mean":
                    one = 1 / (each.num_tokens * len(found.conversations))
                weights += [0.0] * asked + [one] * said
                place = len(given.prompt) + said
            rest = [0.0] * (batch.input_ids.shape[1] - len(expected))
            torch.testing.assert_close(batch.advantages[row], torch.tensor(expected + rest))
            torch.testing.assert_close(batch.loss_weights[row], torch.tensor(weights + rest))
    lines = of_phase(result, "train")
    assert all(line["turns"] == 2 for line in lines)
    for line, found in zip(lines, rollouts, strict=True):
        tokens = found.to_batch().num_tokens
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(tokens)
    assert any(line.get("failed/KeyError", 0) > 0 for line in lines)
    failed = sum(len(each.failed) for each in rollouts)
    total = failed + sum(map(len, rollouts))
    shares = [len(r.failed) / (len(r) + len(r.failed)) for r in rollouts]
    assert [line.get("failed_fraction", 0.0) for line in lines] == pytest.approx(shares)
    assert 0 < failed < total / 2
    sample = samples_at(tmp_path, 1)[0]
    assert [turn["given"] for turn in sample["turns"]] == [sample["prompt"], "+1="]
    assert len(sample["sampled"]) == len(sample["token_ids"]) == len(sample["trainer_logprobs"])


async def three_ways(row: Any, policy: nemorl.Policy) -> nemorl.Outcome:
    """Goes on, goes another way, and begins anew: three segments."""
    said = await policy.sample(policy.prompt)
    begun = [*policy.prompt, *said.token_ids]
    for prompt in ([*begun, 4], [*begun, 5], policy.prompt[1:]):
        said = await policy.sample(prompt)
    return nemorl.Outcome(reward=float(len(said.text)))


def test_segments_of_a_conversation_are_compared_together_and_computed_apart(tmp_path, monkeypatch):
    """No microbatch has to hold a conversation: only its longest segment. The numbers are those of
    microbatches that hold all, and compute what rows begin with once or not.
    """
    batches, rollouts = watched(monkeypatch)
    found = []
    for size, share in ((16, True), (400, True), (400, False)):
        config = grpo_config(
            tmp_path / f"{size}-{share}",
            steps=2,
            kl=nemorl.KLConfig(coef=0.1),
            num_updates_per_batch=2,
            data=nemorl.DataConfig(max_total_sequence_length=12),
            trainer=nemorl.TrainerConfig(
                device="cpu", micro_batch_tokens=size, share_prompts=share
            ),
        )
        found.append(of_phase(run(config, reward=None, environment=three_ways), "train"))
    assert len(batches) == 12 and len(rollouts) == 6
    for number, batch in enumerate(batches):
        rolled = rollouts[number // 2]
        assert len(batch) == 3 * len(rolled) and batch.segment_ids.max() == 1
        assert batch.loss_mask.sum() == rolled.lengths.sum()
        both = rolled.to_batch()
        assert both.segment_ids.amax(-1).tolist() == [3] * len(rolled)
        assert both.lengths.max() > 12
        weights = batch.loss_weights.view(-1, 3, batch.loss_weights.shape[1]).sum((1, 2))
        torch.testing.assert_close(weights, torch.full((len(rolled),), 1 / len(rolled)))
    for sample in samples_at(tmp_path / "16-True", 1):
        places = [place for turn in sample["turns"] for place in range(*turn["tokens"])]
        assert places == [place for place, own in enumerate(sample["sampled"]) if own]
        assert [turn["rewritten"] for turn in sample["turns"]] == [False, False, False, True]
    for one, both, alone in zip(*found, strict=True):
        for other in (both, alone):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        # Segments begin with four tokens of at most twelve that others have, or with eight.
        assert both["trainer/shared_fraction"] > 0.3 > alone["trainer/shared_fraction"] == 0


class Adder:
    """Adds."""

    def reset(self, answer: str) -> None:
        self.answer, self.said = answer, None

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        self.said = a + b
        return self.said


def test_rewards_get_the_environments_of_tools(tmp_path):
    """TRL's environment_factory, on a model that knows no tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    seen = []

    def reward(completions, environments, answer, **columns):
        seen.append(list(zip(environments, answer, completions, strict=True)))
        return [float(len(said[-1]["content"])) for said in completions]

    result = nemorl.train(
        tiny_model(scale=2.0),
        chat_rows(),
        reward,
        tokenizer=tokenizer,
        environment_factory=Adder,
        generation={"max_new_tokens": 4},
        num_prompts_per_step=3,
        num_generations_per_prompt=4,
        max_num_steps=2,
        run={"dir": str(tmp_path), "display": "none", "plots": False, "export": False},
        max_total_sequence_length=256,
    )
    assert len(seen) == 2 and all(len(each) == 12 for each in seen)
    for environment, answer, completion in seen[0]:
        assert completion[0]["role"] == "assistant"
        assert isinstance(environment, Adder) and environment.answer == answer
        assert completion[-1]["role"] == "assistant"
    assert of_phase(result, "train")[0]["tool_calls"] == 0.0


def test_settings_of_turns_that_do_not_fit():
    config = nemorl.GRPOConfig(advantage=GroupAdvantage(level="turn"))
    with pytest.raises(ValueError, match=r"advantage\.level is not for overlong\.buffer"):
        replace(config, overlong=replace(config.overlong, buffer=0.2))
    with pytest.raises(
        ValueError, match=r"loss must be of tokens with advantage\.level turn, but it is .gspo."
    ):
        replace(config, loss=nemorl.GSPOLoss())
    replace(config, loss=nemorl.GSPOLoss(token_gradient=True))


TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
CHAT = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}] * 4


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        (None, CHAT, "an environment of tools needs a chat template with tools.*environments.md"),
        (TEMPLATE, addition_rows(), "row 1: a prompt must be messages .*: add --data.chat"),
        (TEMPLATE, CHAT, "row 1: the sequence has 24 tokens, but the maximum is 14"),
    ],
)
def test_tools_count_before_a_model_is_loaded(template, rows, message: str, tmp_path, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("nemorl.runtime.run.loop.live_parts", loaded)
    data = nemorl.DataConfig(max_total_sequence_length=18)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    config = grpo_config(tmp_path / "run", data=data)
    with pytest.raises(ValueError, match=message):
        run(config, train=rows, tokenizer=tokenizer, environment="calculator", reward="exact_match")
