"""Rows: advantages from rewards and values."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemorl.losses import (
    advantages,
    at_last_token,
    dr_grpo,
    gae,
    gdpo,
    grpo,
    opd,
    overlong_penalty,
    pass_at_k,
    reinforce_plus_plus,
    rloo,
    to_tokens,
    whiten,
)
from oracle.batches import Sequences
from oracle.compare import Row
from oracle.peers import load, statements, trainer


def ours(**options: Any) -> Any:
    return lambda b: to_tokens(advantages.advantages(b.rewards, b.group, **options), b.mask)


def preset(function: Any) -> Any:
    return lambda b: to_tokens(function(b.rewards, b.group), b.mask)


def by_length(b: Sequences) -> Tensor:
    return ours(baseline="length_weighted", scale="none", lengths=b.mask.sum(-1))(b)


def greedy(b: Sequences) -> Tensor:
    return ours(baseline="greedy", scale="none", greedy_rewards=b.rewards.flip(0))(b)


def verl(name: str, **options: Any) -> Any:
    def run(b: Sequences) -> Tensor:
        estimate = load("verl.trainer.ppo.core_algos").get_adv_estimator_fn(name)
        # All of these but two read a sum over the row, masked tokens included.
        rewards = torch.zeros_like(b.values).index_fill(1, torch.tensor(0), 1) * b.rewards[:, None]
        given = {"index": b.group.numpy(), **options}
        if name == "remax":
            rewards, given = (
                at_last_token(b.rewards, b.mask),
                {"reward_baselines": b.rewards.flip(0)},
            )
        if name == "reinforce_plus_plus":
            rewards = at_last_token(b.rewards, b.mask) - 0.1 * kl(b)
            given = {"config": SimpleNamespace(gamma=1.0)}
        found = estimate(token_level_rewards=rewards, response_mask=b.mask.double(), **given)[0]
        return on(b.mask, found)

    return run


def on(mask: Tensor, values: Tensor) -> Tensor:
    """Off the mask nothing is read."""
    return torch.where(mask, values, 0.0)


def kl(b: Sequences) -> Tensor:
    return on(b.mask, b.prev - b.reference)


def trl(scale: str = "group", how: str = "sum_then_normalize") -> Any:
    def run(b: Sequences) -> Tensor:
        module = load("trl.trainer.grpo_trainer")
        columns = [b.rewards] if how == "sum_then_normalize" else [b.rewards, b.rewards.flip(0)]
        parts = torch.tensor([1.0, 0.5][: len(columns)])
        scope = {
            "self": trainer(
                scale_rewards=scale,
                multi_objective_aggregation=how,
                reward_weights=parts,
                reward_funcs=columns,
            ),
            "rewards_per_func": torch.stack(columns, -1),
            "unscorable_mask": torch.zeros(len(b.rewards), dtype=torch.bool),
            "num_generations": b.size,
            "device": "cpu",
        }
        method = module.GRPOTrainer._generate_and_score_completions
        found = statements(method, "if self.multi_objective_aggregation", scope)
        return on(b.mask, found.advantages.nan_to_num(0.0)[:, None])

    return run


def trl_rloo(b: Sequences) -> Tensor:
    grouped = b.rewards.view(-1, b.size)
    scope = {
        "num_generations": b.size,
        "grouped_sum": grouped.sum(1, keepdim=True),
        "grouped_rewards": grouped,
        "scorable_counts": torch.tensor(b.size),
        "rewards": b.rewards,
    }
    method = load("trl.trainer.rloo_trainer").RLOOTrainer._generate_and_score_completions
    found = statements(method, "if num_generations > 1:\n    baselines", scope)
    return on(b.mask, found.advantages[:, None])


def openrlhf(estimator: str, kl_coef: float = 0.0) -> Any:
    def run(b: Sequences) -> Tensor:
        maker = load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=0.95, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=b.size),
            algo=SimpleNamespace(advantage=advantage),
            reward=SimpleNamespace(clip_range=None),
        )
        experience = SimpleNamespace(
            rewards=b.rewards.clone(),
            index=list(range(len(b.rewards))),
            info={},
            kl=kl(b),
            action_mask=b.mask,
            values=b.values,
        )
        self = trainer(
            strategy=SimpleNamespace(args=args),
            advantage_estimator=estimator,
            kl_ctl=SimpleNamespace(value=kl_coef),
        )
        self.get_cumulative_returns = lambda *x: maker.get_cumulative_returns(self, *x)
        self.get_advantages_and_returns = lambda *x: maker.get_advantages_and_returns(self, *x)
        (found,) = maker.compute_advantages_and_returns(self, [experience])
        return on(b.mask, found.advantages)

    return run


def our_gdpo(b: Sequences) -> Tensor:
    columns = torch.stack([b.rewards, b.rewards.flip(0)], -1)
    return to_tokens(gdpo(columns, b.group, weights=(1.0, 0.5)), b.mask)


def verl_gdpo(b: Sequences) -> Tensor:
    core = load("verl.trainer.ppo.core_algos")
    last = (b.mask * torch.arange(b.mask.shape[1])).argmax(-1)
    config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]}
    prompt = torch.ones(len(b.rewards), 1, dtype=torch.long)
    # Its index of the last token is the number of attended tokens less one.
    attended = (torch.arange(b.mask.shape[1]) <= last[:, None]).long()
    return core.compute_gdpo_outcome_advantage(
        b.values,
        b.mask.double(),
        b.group.numpy(),
        config=config,
        non_tensor_batch={"a": b.rewards.numpy(), "b": b.rewards.flip(0).numpy()},
        batch={"prompts": prompt, "attention_mask": torch.cat([prompt, attended], 1)},
    )[0]


def our_pass_at_k(b: Sequences) -> Tensor:
    return to_tokens(pass_at_k(b.rewards, b.group, k=b.size) / b.size, b.mask)


def our_gae(b: Sequences) -> Tensor:
    rewards = at_last_token(b.rewards, b.mask)
    found, returns = gae(rewards, b.values, b.mask, gamma=0.9, lam=0.8)
    return torch.cat([found, returns])


def verl_gae(b: Sequences) -> Tensor:
    core = load("verl.trainer.ppo.core_algos")
    rewards, mask = at_last_token(b.rewards, b.mask), b.mask.double()
    values = b.values
    found, returns = core.compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    return torch.cat([on(b.mask, found), on(b.mask, returns)])


def whitened_gae(b: Sequences) -> Tensor:
    found, returns = our_gae(b).chunk(2)
    return torch.cat([whiten(found, b.mask), returns])


def openrlhf_gae(b: Sequences) -> Tensor:
    maker = load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    rewards = openrlhf_rewards(b)
    both = maker.get_advantages_and_returns(None, b.values, rewards, b.mask, 0.9, 0.8)
    return torch.cat([on(b.mask, x) for x in both])


def openrlhf_rewards(b: Sequences) -> Tensor:
    reward = load("openrlhf.models.utils").compute_reward
    return on(b.mask, reward(b.rewards, 0.0, torch.zeros_like(b.values), b.mask))


def our_plus_plus(**options: Any) -> Any:
    return lambda b: reinforce_plus_plus(b.rewards, kl(b), b.mask, **options)


def grouped_plus_plus(ddof: int) -> Any:
    return lambda b: reinforce_plus_plus(
        b.rewards, kl(b), b.mask, kl_coef=0.0, group_id=b.group, ddof=ddof
    )


def verl_whiten(b: Sequences) -> Tensor:
    functional = load("verl.utils.torch_functional")
    return on(b.mask, functional.masked_whiten(b.values, b.mask.double()))


def our_overlong(b: Sequences) -> Tensor:
    return b.rewards + overlong_penalty(b.mask.sum(-1), max_length=6, buffer=3)


def openrlhf_overlong(b: Sequences) -> Tensor:
    penalty = load("openrlhf.trainer.ppo_utils.length_penalty")
    experience = SimpleNamespace(response_length=b.mask.sum(-1), rewards=b.rewards.clone())
    penalty.apply_overlong_penalty([experience], 6, 3)
    return experience.rewards


def verl_opd(b: Sequences) -> Tensor:
    core = load("verl.trainer.ppo.core_algos")
    return on(b.mask, -core.kl_penalty(b.prev, b.reference, "k1"))


FLAT = {"norm_adv_by_std_in_grpo": False}
ROWS = [
    Row("grpo", "verl", "adv_estimator=grpo", preset(grpo), verl("grpo"), notes=("one",)),
    Row(
        "grpo",
        "verl",
        "grpo_vectorized",
        preset(grpo),
        verl("grpo_vectorized"),
        notes=("flat", "one"),
    ),
    Row(
        "grpo", "trl", "scale_rewards=group", preset(grpo), trl("group"), notes=("flat", "epsilon")
    ),
    Row(
        "grpo",
        "openrlhf",
        "estimator=group_norm",
        preset(grpo),
        openrlhf("group_norm"),
        notes=("flat", "one"),
    ),
    Row(
        "dr_grpo",
        "verl",
        "norm_adv_by_std_in_grpo=False",
        preset(dr_grpo),
        verl("grpo", **FLAT),
        notes=("one",),
    ),
    Row("dr_grpo", "trl", "scale_rewards=none", preset(dr_grpo), trl("none")),
    Row("dr_grpo", "openrlhf", "estimator=dr_grpo", preset(dr_grpo), openrlhf("dr_grpo")),
    Row(
        "advantages(scale=batch_std)",
        "trl",
        "scale_rewards=batch",
        ours(scale="batch_std"),
        trl("batch"),
        notes=("flat", "epsilon"),
    ),
    Row(
        "advantages(baseline=batch_mean, scale=none)",
        "openrlhf",
        "estimator=flash_reinforce",
        ours(baseline="batch_mean", scale="none"),
        openrlhf("flash_reinforce"),
    ),
    Row("rloo", "verl", "adv_estimator=rloo", preset(rloo), verl("rloo"), notes=("one",)),
    Row("rloo", "verl", "rloo_vectorized", preset(rloo), verl("rloo_vectorized")),
    Row("rloo", "trl", "RLOOTrainer", preset(rloo), trl_rloo),
    Row("rloo", "openrlhf", "estimator=rloo", preset(rloo), openrlhf("rloo"), notes=("one",)),
    Row(
        "advantages(baseline=length_weighted, scale=none)",
        "verl",
        "adv_estimator=opo",
        by_length,
        verl("opo"),
        notes=("one",),
    ),
    Row(
        "advantages(baseline=greedy, scale=none)",
        "verl",
        "adv_estimator=remax",
        greedy,
        verl("remax"),
    ),
    Row("gdpo", "verl", "adv_estimator=gdpo", our_gdpo, verl_gdpo, notes=("one", "empty", "gdpo")),
    Row(
        "gdpo",
        "trl",
        "normalize_then_sum",
        our_gdpo,
        trl(how="normalize_then_sum"),
        notes=("epsilon",),
    ),
    Row(
        "pass_at_k(k=group) / k",
        "verl",
        "grpo_passk, no std",
        our_pass_at_k,
        verl("grpo_passk", config=FLAT),
        notes=("one",),
    ),
    Row(
        "reinforce_plus_plus",
        "verl",
        "adv_estimator=reinforce_plus_plus",
        our_plus_plus(kl_coef=0.1),
        verl("reinforce_plus_plus"),
        notes=("empty", "root"),
    ),
    Row(
        "reinforce_plus_plus(ddof=0)",
        "openrlhf",
        "estimator=reinforce",
        our_plus_plus(kl_coef=0.1, ddof=0),
        openrlhf("reinforce", 0.1),
        notes=("root",),
    ),
    Row(
        "reinforce_plus_plus(group_id)",
        "verl",
        "reinforce_plus_plus_baseline",
        grouped_plus_plus(1),
        verl("reinforce_plus_plus_baseline"),
        notes=("one", "empty"),
    ),
    Row(
        "reinforce_plus_plus(group_id, ddof=0)",
        "openrlhf",
        "estimator=reinforce_baseline",
        grouped_plus_plus(0),
        openrlhf("reinforce_baseline"),
    ),
    Row(
        "whiten",
        "verl",
        "masked_whiten",
        lambda b: whiten(b.values, b.mask),
        verl_whiten,
        notes=("empty",),
    ),
    Row("gae, whiten", "verl", "adv_estimator=gae", whitened_gae, verl_gae, notes=("empty", "nan")),
    Row("gae", "openrlhf", "estimator=gae", our_gae, openrlhf_gae, notes=("tool", "nan")),
    Row(
        "at_last_token",
        "openrlhf",
        "compute_reward",
        lambda b: at_last_token(b.rewards, b.mask),
        openrlhf_rewards,
    ),
    Row("overlong_penalty", "openrlhf", "apply_overlong_penalty", our_overlong, openrlhf_overlong),
    Row("opd", "verl", "−kl_penalty(k1)", lambda b: opd(b.reference, b.prev, b.mask), verl_opd),
]
