"""PPO against the algorithm's box, written out plainly here, and what its critic learns."""

import copy
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nemorl
from nemorl.runtime.run.loop import Step
from tests.runtime.runs import (
    addition_rows,
    digits,
    of_phase,
    ppo_config,
    saved_critic,
    saved_model,
    start,
)
from tests.tiny_models import tiny_critic, tiny_model, tiny_tokenizer

LR, CRITIC_LR, MAX_NORM = 0.02, 0.01, 0.5


def longer(prompt: str, response: str) -> float:
    return digits(prompt, response) + len(response)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is sampled, and what each model is trained on, in order."""
    events: list[tuple[str, Any]] = []
    sample, train = Step.sample, Step.train

    def sampling(*args: Any, **options: Any) -> Any:
        events.append(("sample", sample(*args, **options)))
        return events[-1][1]

    def training(self: Step, batch: Any, loss_fn: Any, *, backend: str = "policy") -> Any:
        events.append((backend, batch))
        return train(self, batch, loss_fn, backend=backend)

    monkeypatch.setattr(Step, "sample", sampling)
    monkeypatch.setattr(Step, "train", training)
    return events


def logprobs(model: Any, row: dict[str, Any]) -> Tensor:
    """Of the tokens that were sampled, each in the text of its own segment."""
    found = []
    for ids, places in row["segments"]:
        every = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [every[place - 1, ids[place]] for place in places]
    return torch.stack(found)


def values(critic: Any, row: dict[str, Any]) -> Tensor:
    """Of the text before each of them."""
    found = []
    for ids, places in row["segments"]:
        every = critic.score(critic.model(torch.tensor([ids])).last_hidden_state)[0, :, 0]
        found += [every[place - 1] for place in places]
    return torch.stack(found)


def segments(turns: Any) -> list[tuple[list[int], list[int]]]:
    """The texts that the turns are in, with the places of what was sampled."""
    found: list[tuple[list[int], list[int]]] = []
    for turn in turns:
        prompt, places = [*turn.prompt], list[int]()
        if found and prompt[: len(found[-1][0])] == found[-1][0]:
            places = found.pop()[1]
        ids = [*prompt, *turn.completion.token_ids]
        found.append((ids, [*places, *range(len(prompt), len(ids))]))
    return found


def discounted(delta: list[float], decay: float) -> list[float]:
    found = 0.0
    return [found := each + decay * found for each in reversed(delta)][::-1]


def estimate(rows: list[dict[str, Any]], models: Any, config: Any) -> float:
    """Add advantages and returns, and return the explained variance."""
    policy, reference, critic = models
    choice = config.advantage
    for row in rows:
        with torch.no_grad():
            row["old"], row["ref"] = logprobs(policy, row), logprobs(reference, row)
            row["V"] = values(critic, row)
        v = [*row["V"].tolist(), 0.0]
        rewards = (-choice.kl_coef * (row["old"] - row["ref"])).tolist()
        rewards[-1] += row["reward"]
        delta = [r + choice.gamma * v[t + 1] - v[t] for t, r in enumerate(rewards)]
        lam = choice.lam
        if choice.length_alpha:
            lam = max(0.0, 1 - 1 / (choice.length_alpha * len(rewards)))
        row["A"] = discounted(delta, choice.gamma * lam)
        of_values = lam if choice.value_lam is None else choice.value_lam
        gains = discounted(delta, choice.gamma * of_values)
        row["G"] = torch.tensor([gain + each for gain, each in zip(gains, v, strict=False)])
    if choice.whiten:
        every = [each for row in rows for each in row["A"]]
        mean, deviation = statistics.fmean(every), statistics.stdev(every)
        for row in rows:
            row["A"] = [(each - mean) / (deviation + 1e-6) for each in row["A"]]
    targets, old = (torch.cat([row[name] for row in rows]) for name in ("G", "V"))
    return float(1 - (targets - old).var() / targets.var())


def policy_loss(policy: Any, row: dict[str, Any], config: Any) -> Tensor:
    now, better = logprobs(policy, row), torch.tensor(row["A"])
    ratio, apart = (now - row["old"]).exp(), row["ref"] - now
    gain = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better)
    return -gain + config.kl.coef * (apart.exp() - apart - 1)


def value_loss(critic: Any, row: dict[str, Any], clip: float | None) -> Tensor:
    now, old, target = values(critic, row), row["V"], row["G"]
    square = (now - target) ** 2
    if clip is not None:
        near = torch.maximum(torch.minimum(now, old + clip), old - clip)
        square = torch.maximum(square, (near - target) ** 2)
    return square / 2


def follow(events: list[tuple[str, Any]], config: Any, policy: Any, critic: Any) -> list[float]:
    """Train the models as the box says, on what was sampled, in the order of the minibatches."""
    models = {"policy": policy, "critic": critic}
    reference, known, explained = copy.deepcopy(policy), dict[Any, Any](), list[float]()
    optimizers = {
        name: torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
        )
        for (name, model), lr in zip(models.items(), (LR, CRITIC_LR), strict=True)
    }
    for what, found in events:
        if what == "sample":
            known = {}
            for each, cut in zip(found.conversations, found.truncated, strict=True):
                row = {"segments": segments(each.turns), "reward": each.outcome.reward}
                key = tuple(token for ids, _ in row["segments"] for token in ids)
                known.setdefault(key, []).append(row | {"cut": bool(cut)})
            rows = [row for same in known.values() for row in same]
            rows = [row for row in rows if not (config.overlong.filter and row["cut"])]
            explained.append(estimate(rows, (policy, reference, critic), config))
            continue
        lengths = found.lengths.tolist()
        some = [known[(*found.input_ids[i, :n].tolist(),)][0] for i, n in enumerate(lengths)]
        some = [row for row in some if "A" in row]
        losses = [
            policy_loss(policy, row, config)
            if what == "policy"
            else value_loss(critic, row, config.critic.clip)
            for row in some
        ]
        optimizers[what].zero_grad()
        torch.cat(losses).mean().backward()
        nn.utils.clip_grad_norm_(models[what].parameters(), MAX_NORM)
        optimizers[what].step()
    return explained


async def three_turns(row: Any, policy: nemorl.Policy) -> nemorl.Outcome:
    """The second after an observation, the third in another text: a segment of its own."""
    said = await policy.sample(policy.prompt)
    more = await policy.sample([*policy.prompt, *said.token_ids, 12, 13])
    last = await policy.sample([14, *policy.prompt, *more.token_ids])
    return nemorl.Outcome(reward=digits("", said.text + more.text + last.text))


SEVERAL = {"num_updates_per_batch": 2, "train_global_batch_size": 3}
CASES: dict[str, dict[str, Any]] = {
    "PPO": {
        **SEVERAL,
        "num_prompts_per_step": 6,
        "advantage": nemorl.GAEAdvantage(kl_coef=0.1),
        "critic": nemorl.CriticConfig(clip=0.02, warmup_steps=1),
    },
    "VAPO": {
        **SEVERAL,
        "advantage": nemorl.GAEAdvantage(gamma=0.9, length_alpha=0.5, value_lam=1.0, whiten=False),
        "critic": nemorl.CriticConfig(clip=None),
        "kl": nemorl.KLConfig(coef=0.1),
        "overlong": nemorl.OverlongConfig(filter=True),
        "num_prompts_per_step": 15,
    },
    "turns": {"advantage": nemorl.GAEAdvantage(lam=0.5), "critic": nemorl.CriticConfig()},
}


@pytest.mark.slow_cases(but=["PPO"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_algorithm_of_its_paper(name: str, tmp_path: Path, monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "scale": 3.0}
    policy, critic, options = tiny_model(**sizes), tiny_critic(**sizes, seed=3), dict(CASES[name])
    saved_critic(tmp_path / "critic", **sizes, seed=3)
    begun = {key: weight.clone() for key, weight in policy.state_dict().items()}
    of_critic = replace(options.pop("critic"), model=str(tmp_path / "critic"), lr=CRITIC_LR)
    config = ppo_config(
        tmp_path / "run",
        steps=3,  # in the third the reference is behind
        optimizer=nemorl.OptimizerConfig(lr=LR, eps=1e-3, max_grad_norm=MAX_NORM),
        critic=of_critic,
        **options,
    )
    events, kept = watched(monkeypatch), list[dict[str, dict[str, Tensor]]]()

    class Keep(nemorl.Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            found = {name: dict(each.weights()) for name, each in trainer.backends.items()}
            kept.append(copy.deepcopy(found))

    judged = {"environment": three_turns} if name == "turns" else {"reward": longer}
    result = nemorl.run(
        config,
        model=copy.deepcopy(policy),
        tokenizer=tiny_tokenizer(),
        train=addition_rows(),
        callbacks=[Keep()],
        **judged,
    )
    explained = follow(events, config, policy, critic)
    for found, model in (("policy", policy), ("critic", critic)):
        for key, weight in model.named_parameters():
            torch.testing.assert_close(kept[-1][found][key], weight.detach(), rtol=0.0, atol=1e-5)
    measured = [line["critic/explained_variance"] for line in of_phase(result, "train")]
    assert measured == pytest.approx(explained, rel=1e-3, abs=1e-4)
    first = kept[0]["policy"]
    warms_up = all(torch.equal(begun[key], weight) for key, weight in first.items())
    assert warms_up == (config.critic.warmup_steps == 1)
    assert any((begun[key] - each).abs().max() > LR for key, each in kept[-1]["policy"].items())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_and_its_critic_explains_the_rewards(seed: int, tmp_path: Path):
    """Half of the reward is the prompt's, which only a critic can tell from the response's."""

    def reward(prompt: str, response: str) -> float:
        return digits(prompt, response) + 2.0 * (int(prompt[0]) > 3)

    config = ppo_config(
        tmp_path / "run",
        steps=30,
        num_prompts_per_step=32,
        critic=nemorl.CriticConfig(
            lr=1e-2, model=saved_critic(tmp_path / "critic", seed=seed), warmup_steps=5
        ),
        advantage=nemorl.GAEAdvantage(value_lam=1.0),
        run={"seed": seed, "plots": True},
        **SEVERAL | {"train_global_batch_size": 16},
    )
    lines = of_phase(start(config, reward=reward, seed=seed), "train")
    before, after = ([line["reward"] for line in part] for part in (lines[:5], lines[-5:]))
    assert statistics.fmean(after) > statistics.fmean(before) + 0.3
    assert (tmp_path / "run" / "plots" / "critic_explained_variance.png").exists()
    explained = [line["critic/explained_variance"] for line in lines]
    assert max(explained[:2]) < 0.5 < statistics.fmean(explained[-5:])


@pytest.mark.filterwarnings("ignore:step 1. no token has an advantage")
def test_a_step_without_a_trained_token_updates_nothing(tmp_path: Path):
    config = ppo_config(
        tmp_path / "run",
        steps=1,
        generation=nemorl.GenerationConfig(max_new_tokens=1),
        overlong=nemorl.OverlongConfig(filter=True),
        critic=nemorl.CriticConfig(model=saved_critic(tmp_path / "critic")),
    )
    (line,) = of_phase(start(config, reward=longer, scale=0.0), "train")
    assert (line["num_updates"], line["loss"], line["critic/explained_variance"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"async_": nemorl.AsyncConfig(max_staleness=2)},
        {
            "advantage": nemorl.GAEAdvantage(),
            "num_updates_per_batch": 2,
            "off_policy": nemorl.OffPolicyConfig(proximal="interpolate"),
        },
    ],
)
def test_it_samples_ahead_and_interpolates(settings: Any, tmp_path: Path):
    critic = nemorl.CriticConfig(model=saved_critic(tmp_path / "critic"))
    config = ppo_config(tmp_path / "run", critic=critic, **settings)
    lines = of_phase(start(config), "train")
    assert all(line["receipts/tokens"] > 0 for line in lines[1:]) and len(lines) == 4


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (nemorl.GAEAdvantage, {"lam": 1.5}, "advantage.lam must lie in 0 … 1, but it is 1.5"),
        (nemorl.GAEAdvantage, {"value_lam": -1}, "advantage.value_lam must lie in 0 … 1"),
        (nemorl.GAEAdvantage, {"length_alpha": 0.0}, "advantage.length_alpha must be above 0"),
        (
            nemorl.GAEAdvantage,
            {"length_alpha": 0.05, "lam": 0.9},
            "advantage.lam can't be given together with advantage.length_alpha",
        ),
        (nemorl.CriticConfig, {"clip": 0.0}, "critic.clip must be positive"),
        (nemorl.CriticConfig, {"warmup_steps": -1}, "critic.warmup_steps must be at least 0"),
    ],
)
def test_settings_that_can_not_be(section: Any, values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        section(**values)


TWICE = {"kl": nemorl.KLConfig(coef=0.1), "advantage": nemorl.GAEAdvantage(kl_coef=0.1)}


def other_tokens(folder: Path) -> Path:
    """A model's folder whose tokenizer has two letters' ids swapped."""
    saved_model(folder)
    text = (folder / "tokenizer.json").read_text()
    swapped = text.replace('"1": 3', '"1": 4').replace('"2": 4', '"2": 3')
    assert swapped != text
    (folder / "tokenizer.json").write_text(swapped)
    return folder


@pytest.mark.parametrize(
    ("critic", "options", "message"),
    [
        ({"warmup_steps": 4}, {}, "critic.warmup_steps must be below max_num_steps (4)"),
        ({}, {"loss": nemorl.GMPOLoss()}, "loss must be of tokens with a critic"),
        ({}, TWICE, "kl.coef must be 0 with advantage.kl_coef above 0"),
        ({"model": "./critic"}, {}, "critic.model must be a folder with a Hugging Face model"),
        ({"model": other_tokens}, {}, "must have the policy's tokenizer"),
        ({"own_ranks": True, "model": saved_critic}, {}, "own_ranks needs ranks that Ray places"),
        ({}, {}, "model must be given for a scalar head where the policy's was"),
    ],
)
def test_what_is_refused_before_the_model_loads(critic, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nemorl.runtime.run.loop.live_parts", None)
    if callable(make := critic.get("model")):
        critic = critic | {"model": str(make(tmp_path / "made"))}
    with pytest.raises(ValueError, match=re.escape(message)):
        start(ppo_config(tmp_path / "run", critic=nemorl.CriticConfig(**critic), **options))
