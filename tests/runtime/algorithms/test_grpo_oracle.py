"""GRPO's presets and options against the algorithm boxes of their papers, written out here.

The oracle is plain: loops over responses and their tokens, Hugging Face's own forward pass,
autograd, torch's AdamW. It uses no function of nemorl. A scripted engine gives known responses to
`nemorl.train`, whose final weights and metrics must be the oracle's.
"""

import copy
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import nemorl
from nemorl.models.source import ModelSource
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.config.grpo import PRESETS
from nemorl.runtime.run import registry
from tests.runtime.runs import of_phase, run_config, samples_at
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPTS, GROUP, LIMIT, STEPS = 3, 4, 5, 4
LR, EPS, MAX_NORM = 0.02, 1e-3, 0.5
"""A large eps: AdamW's update is then smooth in gradients that are 0 but for rounding."""
CLOSE = {"rtol": 0.0, "atol": 5e-4 * LR}


@dataclass
class Response:
    """A scripted response, and what the oracle computes of it."""

    prompt: list[int]
    tokens: list[int]
    reward: float
    truncated: bool
    sampled: Tensor
    """The sampler's logprob of each token."""
    group: int = 0
    number: int = 0
    shaped: float = 0.0
    A: Any = 0.0
    """Advantage: a number, or one per token."""
    now: Tensor = field(default_factory=lambda: torch.zeros(0))
    old: Tensor = field(default_factory=lambda: torch.zeros(0))
    ref: Tensor = field(default_factory=lambda: torch.zeros(0))
    entropy: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __len__(self) -> int:
        return len(self.tokens)


# The script: a stream of prompts. Each has four responses: (reward, tokens, truncated).
E, T = (0, False), (LIMIT, True)  # an empty response; one that was cut off at the limit
STREAM: list[list[tuple[float, tuple[int, bool]]]] = [
    # Step 1 of a plain run: two groups that differ, one of equal rewards.
    [(1.0, (3, False)), (0.0, (5, False)), (0.5, (1, False)), (0.0, T)],
    [(1.0, (2, False)), (1.0, (4, False)), (1.0, T), (1.0, (3, False))],
    [(0.0, E), (1.0, (2, False)), (0.0, (4, False)), (0.0, T)],
    # Step 2: equal rewards everywhere, though the lengths differ.
    [(0.0, T), (0.0, (1, False)), (0.0, T), (0.0, (4, False))],
    [(0.1, (2, False)), (0.1, (4, False)), (0.1, (3, False)), (0.1, (1, False))],
    [(1.0, (4, False)), (1.0, T), (1.0, (2, False)), (1.0, E)],
    # Step 3: a group in which all but one are equal, and one that is cut off throughout.
    [(0.3, (4, False)), (0.1, (2, False)), (0.1, (3, False)), (0.1, (5, False))],
    [(0.0, T), (1.0, T), (0.0, T), (0.0, T)],
    [(-1.0, (1, False)), (2.0, (3, False)), (0.5, E), (0.0, (2, False))],
    # Step 4.
    [(1.0, (5, False)), (0.0, (3, False)), (1.0, T), (0.0, (4, False))],
    [(0.7, (3, False)), (0.7, (2, False)), (0.7, (1, False)), (0.7, (4, False))],
    [(0.0, (2, False)), (0.0, (4, False)), (1.0, (1, False)), (1.0, T)],
]
# Dynamic sampling goes on in the stream: these serve its later steps.
# its fourth finds no group that differs in six.
STREAM += [STREAM[i] for i in (3, 4, 10, 1, 5, 4, 3, 0, 8, 6)]


def small_model() -> torch.nn.Module:
    return copy.deepcopy(first_model())


@cache
def first_model() -> torch.nn.Module:
    return tiny_model(
        scale=3.0,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def logprobs_of(
    model: torch.nn.Module, responses: Sequence[Response], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Each response's log π(y_t | x, y_<t), and the entropy of each distribution."""
    rows = [r.prompt + r.tokens for r in responses]
    width = max(map(len, rows))
    logits = model(torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits
    every = (logits / temperature).log_softmax(-1)
    found = []
    for i, r in enumerate(responses):
        before = every[i, len(r.prompt) - 1 : len(r.prompt) - 1 + len(r)]
        chosen = before[torch.arange(len(r)), torch.tensor(r.tokens, dtype=torch.long)]
        found.append((chosen, -(before.exp() * before).sum(-1)))
    return found


def written(temperature: float = 1.0) -> list[list[Response]]:
    """The script's groups, with sampler's logprobs that are some way off the first model's."""
    return copy.deepcopy(first_written(temperature))


@cache
def first_written(temperature: float) -> list[list[Response]]:
    draw = torch.Generator().manual_seed(0)
    tokenizer, groups = tiny_tokenizer(), []
    for number, entries in enumerate(STREAM):
        prompt = tokenizer.encode(prompt_text(number))
        groups.append(
            [
                Response(
                    prompt=prompt,
                    tokens=torch.randint(2, 40, (length,), generator=draw).tolist(),
                    reward=reward,
                    truncated=truncated,
                    sampled=torch.zeros(length),
                    group=number,
                    number=place,
                )
                for place, (reward, (length, truncated)) in enumerate(entries)
            ]
        )
    everyone = [r for group in groups for r in group]
    with torch.no_grad():
        for r, (logprobs, _) in zip(
            everyone, logprobs_of(first_model(), everyone, temperature), strict=True
        ):
            r.sampled = logprobs + 0.5 * torch.randn(len(r), generator=draw)
    return groups


def prompt_text(number: int) -> str:
    return f"{number}="


# --- nemorl's side -------------------------------------------------------------------------------


class Scripted:
    """An engine that answers each prompt as it stands in the script."""

    script: ClassVar[dict[tuple[int, ...], list[Response]]] = {}

    def __init__(self, *, model, tokenizer, precision="float32") -> None:
        self.model, self.policy_version = ModelSource.of(model).load(), 0

    def setup(self, config) -> None: ...

    async def sample(self, prompt, params) -> list[nemorl.Completion]:
        if params.temperature == 0:  # a probe whether it has the trainer's weights
            return [self._greedy(list(prompt))]
        answers = self.script[tuple(prompt)]
        assert params.n == len(answers)
        return [
            nemorl.Completion(
                token_ids=tuple(r.tokens),
                logprobs=tuple(r.sampled.tolist()),
                finish_reason="length" if r.truncated else "stop",
                text=str(number),  # which one it is, for the reward
                policy_versions=(self.policy_version,) * len(r.tokens),
            )
            for number, r in enumerate(answers)
        ]

    def _greedy(self, prompt: list[int]) -> nemorl.Completion:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        token = int(logprobs.argmax())
        return nemorl.Completion(
            token_ids=(token,),
            logprobs=(float(logprobs[token]),),
            finish_reason="length",
            text="",
            policy_versions=(self.policy_version,),
        )

    async def update_weights(self, source, *, in_flight: str = "keep") -> int:
        self.policy_version, _ = source.newest()
        return self.policy_version

    def shutdown(self) -> None: ...


@dataclass
class Outcome:
    """What a run of nemorl's did."""

    weights: dict[str, Tensor]
    steps: list[dict[str, Any]]
    updates: list[list[list[tuple[int, int]]]]
    """Of each step the optimizer steps, of each of these the responses: (group, number)."""
    warnings: list[str]


class Updates(nemorl.Callback):
    """Records the responses of every optimizer step."""

    def __init__(self, groups: list[list[Response]], monkeypatch) -> None:
        self.steps: list[list[list[tuple[int, int]]]] = []
        known = {(*r.prompt, *r.tokens): (r.group, r.number) for group in groups for r in group}
        full = [(*r.prompt, *r.tokens) for group in groups for r in group if len(r)]
        assert len(set(full)) == len(full)
        train_step = DTensorBackend.train_step

        def watched(backend, batch, loss_fn):
            lengths = batch.lengths.tolist()
            rows = [
                tuple(row[:n].tolist()) for row, n in zip(batch.input_ids, lengths, strict=True)
            ]
            self.steps[-1].append([known[row] for row in rows])
            return train_step(backend, batch, loss_fn)

        monkeypatch.setattr(DTensorBackend, "train_step", watched)

    def on_step_begin(self, trainer, step) -> None:
        self.steps.append([])


def trained_by_nemorl(
    groups: list[list[Response]], folder: Path, monkeypatch, *, rewards: Any = None, **options: Any
) -> Outcome:
    monkeypatch.setitem(registry.GENERATION_BACKENDS, "scripted", Scripted)
    script = {tuple(group[0].prompt): group for group in groups}
    monkeypatch.setattr(Scripted, "script", script)
    by_text = {prompt_text(n): group for n, group in enumerate(groups)}
    updates = Updates(groups, monkeypatch)
    generation = {"backend": "scripted", "max_new_tokens": LIMIT} | options.pop("generation", {})
    result = nemorl.train(
        small_model(),
        [{"prompt": prompt_text(n)} for n in range(len(groups))],
        rewards or (lambda prompt, response: by_text[prompt][int(response)].reward),
        tokenizer=tiny_tokenizer(),
        callbacks=[updates, *options.pop("callbacks", ())],
        generation=generation,
        data={"shuffle": False, "max_total_sequence_length": 16},
        optimizer={"lr": LR, "eps": EPS, "max_grad_norm": MAX_NORM},
        trainer=options.pop("trainer", {}) | {"device": "cpu"},
        run=run_config(folder, save_period=0, samples_per_step=options.pop("samples", 0)),
        gap={"warn": None},
        num_prompts_per_step=PROMPTS,
        num_generations_per_prompt=GROUP,
        **{"max_num_steps": STEPS, **options},
    )
    log = (folder / "log.jsonl").read_text().splitlines()
    weights = {name: p.detach().clone() for name, p in result.model.named_parameters()}
    return Outcome(weights, of_phase(result, "train"), updates.steps, log)


# --- The oracle's side: pieces of algorithm boxes ------------------------------------------------


def ratio(r: Response) -> Tensor:
    return (r.now - r.old).exp()


def ppo(
    r: Response, low: float = 0.2, high: float = 0.2, *, dual: float | None = None, s: Any = None
) -> Tensor:
    """−min(sA, clip(s)A), s the ratio of the token; a dual clip bounds it by dual · A if A < 0."""
    s = ratio(r) if s is None else s
    objective = torch.minimum(s * r.A, s.clamp(1 - low, 1 + high) * r.A)
    if dual is not None:
        bound = dual * torch.as_tensor(r.A).expand(objective.shape)
        objective = torch.where(bound < 0, torch.maximum(objective, bound), objective)
    return -objective


def sequence_ratio(r: Response) -> Tensor:
    """GSPO: (π(y)/π_old(y))^(1/|y|), at each of its tokens."""
    return (r.now - r.old).mean().exp().expand(len(r))


def sequence_token_ratio(r: Response) -> Tensor:
    """GSPO-token: sg[s] · π(y_t) / sg[π(y_t)]."""
    return sequence_ratio(r).detach() * (r.now - r.now.detach()).exp()


def cispo(r: Response, low: float, high: float) -> Tensor:
    """−sg[clip(ratio)] · A · log π, in bounds of the ratio."""
    return -ratio(r).detach().clamp(low, high) * r.A * r.now


def reinforce(r: Response) -> Tensor:
    return -r.A * r.now


def k1(r: Response) -> Tensor:
    return r.now - r.ref


def k2(r: Response) -> Tensor:
    return (r.now - r.ref) ** 2 / 2


def k3(r: Response) -> Tensor:
    return (r.ref - r.now).exp() - (r.ref - r.now) - 1


Responses = list[Response]
Losses = list[Tensor]
"""Of each response that is trained on, its tokens' losses."""


def token_mean(rows: Responses, trained: Responses, losses: Losses) -> Tensor:
    return torch.cat(losses).sum() / sum(map(len, trained))


def sequence_mean(rows: Responses, trained: Responses, losses: Losses) -> Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def constant(rows: Responses, trained: Responses, losses: Losses) -> Tensor:
    return torch.cat(losses).sum() / (len(rows) * LIMIT)


def group_mean(rows: Responses, trained: Responses, losses: Losses) -> Tensor:
    groups: dict[int, Losses] = {}
    for r, loss in zip(trained, losses, strict=True):
        groups.setdefault(r.group, []).append(loss)
    return torch.stack([torch.cat(of_group).mean() for of_group in groups.values()]).mean()


REDUCTIONS = {each.__name__: each for each in (token_mean, sequence_mean, constant, group_mean)}


def deviation(values: Sequence[float], ddof: int) -> float:
    mean = statistics.fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def differ(values: Sequence[float]) -> bool:
    return any(value != values[0] for value in values)


def compared(baseline: str = "group_mean", scale: str = "group_std", ddof: int = 1):
    """(R − b) / σ; 0 where all rewards that b or σ is taken over are equal, and without σ where
    those that σ alone is taken over are.
    """

    def advantages(box: "Box", groups: list[Responses]) -> None:
        batch = [r.shaped for group in groups for r in group]
        for group in groups:
            rewards = [r.shaped for r in group]
            for i, r in enumerate(group):
                others = rewards[:i] + rewards[i + 1 :]
                over = {"batch_mean": batch, "batch_std": batch, "none": [0.0, 1.0]}
                r.A = 0.0
                if not differ(over.get(baseline, rewards)) or not differ(over.get(scale, rewards)):
                    continue
                b = {
                    "group_mean": statistics.fmean(rewards),
                    "leave_one_out": statistics.fmean(others),
                    "batch_mean": statistics.fmean(batch),
                    "none": 0.0,
                    "length_weighted": sum(len(o) * o.shaped for o in group)
                    / max(1, sum(map(len, group))),
                }[baseline]
                measured = {
                    "group_std": rewards,
                    "leave_one_out_std": others,
                    "batch_std": batch,
                    "none": [],
                    "group_mean": [],
                }[scale]
                r.A = r.shaped - b
                if scale == "group_mean":
                    mean = statistics.fmean(rewards)
                    r.A = r.A / mean if mean > 0 else 0.0
                if differ(measured):
                    r.A /= deviation(measured, ddof) + 1e-6

    return advantages


def reinforce_plus_plus(kl_coef: float = 0.0, group_baseline: bool = False):
    """R − kl_coef · Σ_{s ≥ t} KL_s at each token, normalized over the batch's tokens."""

    def advantages(box: "Box", groups: list[Responses]) -> None:
        trained = []
        for group in groups:
            mean = statistics.fmean([r.shaped for r in group]) if group_baseline else 0.0
            for r in group:
                kl = r.old - r.ref
                to_go = torch.stack([kl[t:].sum() for t in range(len(r))]) if len(r) else kl
                r.A = r.shaped - mean - kl_coef * to_go
                if box.trains_on(r):
                    trained.append(r)
        values = torch.cat([r.A for r in trained or group]).double()
        for r in trained:
            r.A = (r.A - values.mean()) / (values.std() + 1e-6) if differ(values.tolist()) else 0.0

    return advantages


def best_of(k: int):
    """PKPO: k · mean of max(S, y) − max S over the sets S of k − 1 others."""

    def advantages(box: "Box", groups: list[Responses]) -> None:
        for group in groups:
            for i, r in enumerate(group):
                others = [o.shaped for o in group[:i] + group[i + 1 :]]
                bests = [max(chosen) for chosen in combinations(others, k - 1)]
                r.A = k * statistics.fmean([max(0.0, r.shaped - best) for best in bests])

    return advantages


def soft_gate(r: Response) -> Tensor:
    """SAPO, equations 5 and 6: f(r) = σ(τ(r − 1)) · 4/τ, τ_pos = 1, τ_neg = 1.05."""
    A = torch.as_tensor(r.A)
    tau = torch.where(A > 0, 1.0, 1.05)
    return -A * torch.sigmoid(tau * (ratio(r) - 1)) * 4 / tau


def geometric(r: Response) -> Tensor:
    """GMPO, equation 4 and its listing: (Π_t |clipped ratio|)^(1/|y|), one-sided, from e^±0.4."""
    log, sign = r.now - r.old, 1.0 if r.A > 0 else -1.0  # in the listing 0 where A = 0
    clipped = sign * torch.minimum(sign * log, sign * log.clamp(-0.4, 0.4))
    return clipped.mean().exp().expand(len(r))


def soft_punishment(share: float, penalty: float = 1.0):
    """DAPO, equation 13, with L_max = LIMIT: 0, then falling, then −penalty."""
    cache = round(share * LIMIT)

    def shaped(r: Response) -> float:
        if len(r) <= LIMIT - cache:
            return r.reward
        return r.reward + penalty * ((LIMIT - cache) - len(r)) / cache

    return shaped


@dataclass(kw_only=True)
class Box:
    """An algorithm box: what is done with a stream of groups."""

    policy: Callable[[Response], Tensor] = ppo
    """Each token's loss."""
    advantages: Callable[["Box", list[Responses]], None] = field(default_factory=compared)
    reduce: Callable[[Responses, Responses, Losses], Tensor] = sequence_mean
    weight: Callable[..., Tensor] | None = None
    """By which the policy's loss of each token is multiplied; with `bounded=False` before its
    bounds are applied.
    """
    kl: Callable[[Response], Tensor] | None = None
    kl_coef: float = 0.0
    kl_factor: Callable[[Response], Tensor] | None = None
    """What the estimate is multiplied by for another gradient."""
    entropy_coef: float = 0.0
    shaped: Callable[[Response], float] | None = None
    filters: bool = False
    """Truncated responses are not trained on."""
    rounds: int = 0
    """Dynamic sampling: most rounds."""
    passes: int = 1
    temperature: float = 1.0
    reported: Callable[[Response], Tensor] | None = None
    """The loss that is logged, where its value is not that of `policy`."""
    s: Callable[[Response], Tensor] = ratio
    clips: Callable[[Response, Tensor], dict[str, Tensor]] = lambda r, s: {}
    """Which tokens are clipped, from the response and its ratios."""

    def trains_on(self, r: Response) -> bool:
        return len(r) > 0 and not (self.filters and r.truncated)

    def penalty(self, r: Response) -> Tensor:
        """The KL estimate, which nemorl, like NeMo RL, clamps to ±10."""
        assert self.kl is not None
        estimate = self.kl(r).clamp(-10, 10)
        return estimate if self.kl_factor is None else (estimate * self.kl_factor(r)).clamp(-10, 10)

    def sampled(self, stream: Iterator[Responses]) -> tuple[list[Responses], list[Responses]]:
        """The groups to train on, and all that were sampled."""
        everything: list[Responses] = []
        kept: list[Responses] = []
        for _ in range(self.rounds or 1):
            fresh = [next(stream) for _ in range(PROMPTS - len(kept))]
            everything += fresh
            # 0 < |{o_i | correct}| < G: by the rewards before they are shaped.
            kept += [g for g in fresh if not self.rounds or differ([r.reward for r in g])]
            if len(kept) == PROMPTS:
                break
        return kept, everything

    def loss(self, rows: Responses) -> tuple[Tensor, Tensor]:
        """What is minimized, and what is reported."""
        trained = [r for r in rows if self.trains_on(r)]
        results = []
        for policy in (self.policy, self.reported or self.policy):
            losses = []
            for r in trained:
                loss = policy(r)
                if self.weight is not None:
                    loss = loss * self.weight(r)
                if self.kl is not None:
                    loss = loss + self.kl_coef * self.penalty(r)
                losses.append(loss - self.entropy_coef * r.entropy)
            results.append(self.reduce(rows, trained, losses))
        return results[0], results[1]

    def teaches(self, rows: Responses) -> bool:
        trained = [r for r in rows if self.trains_on(r)]
        by_itself = self.kl_coef or self.entropy_coef
        return any(by_itself or bool((torch.as_tensor(r.A) != 0).any()) for r in trained)


def follow(
    box: Box, groups: list[Responses], updates: list[list[list[tuple[int, int]]]]
) -> tuple[torch.nn.Module, list[dict[str, float]]]:
    """Do what the box says; `updates` says which responses an optimizer step is on."""
    model, reference = small_model(), first_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    stream, log = iter(groups), []
    for of_step in updates:
        kept, everything = box.sampled(stream)
        batch = [r for group in kept for r in group]
        for r in (r for group in everything for r in group):
            r.shaped = box.shaped(r) if box.shaped else r.reward
        if batch:
            with torch.no_grad():
                before = logprobs_of(model, batch, box.temperature)
                references = logprobs_of(reference, batch, box.temperature)
            for r, (old, _), (ref, _) in zip(batch, before, references, strict=True):
                r.old, r.ref = old, ref
            box.advantages(box, kept)
        by_name = {(r.group, r.number): r for r in batch}
        seen: dict[str, list[Any]] = {"loss": [], "grad_norm": []}
        for names in of_step:
            rows = [by_name[name] for name in names]
            assert box.teaches(rows)
            values = logprobs_of(model, rows, box.temperature)
            for r, (now, entropy) in zip(rows, values, strict=True):
                r.now, r.entropy = now, entropy
            loss, reported = box.loss(rows)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            seen["loss"].append(float(reported.detach()))
            seen["grad_norm"].append(float(norm))
            seen.setdefault("num_tokens", []).append(sum(len(r.prompt) + len(r) for r in rows))
            measure(box, rows, seen)
            optimizer.step()
        # Every response that teaches something has its part in every pass, and none has more.
        for name, r in by_name.items():
            count = sum(names.count(name) for names in of_step)
            assert count == box.passes if box.teaches([r]) else count <= box.passes, name
        log.append(summary(box, everything, seen) | {"num_updates": len(of_step)})
    return model, log


def measure(box: Box, rows: Responses, seen: dict[str, list[Any]]) -> None:
    """Add each trained token's values to the step's."""
    for r in (r for r in rows if box.trains_on(r)):
        with torch.no_grad():
            s, known = box.s(r), r.sampled.isfinite()
            gap = (r.old - r.sampled)[known]
            values = {
                "entropy": r.entropy,
                "ratio_mean": s,
                "approx_kl_k1": r.old - r.now,
                "approx_kl_k3": ratio(r) - 1 - (r.now - r.old),
                "generation_nonfinite_fraction": (~known).float(),
                "token_mult_prob_error": gap.abs().exp(),
                "gen_kl_error": gap.exp() - 1 - gap,
                **{f"clip_fraction_{end}": x.float() for end, x in box.clips(r, s).items()},
            }
            # An advantage that is 0 but for rounding may count as clipped or not.
            size = torch.as_tensor(r.A).abs()
            values["of_no_sign"] = ((size > 0) & (size < 1e-9)).float().expand(len(r))
            if box.kl is not None:
                values["kl"] = box.penalty(r)
            if box.weight is not None:
                w = box.weight(r)
                values["importance_weight_mean"] = w
                values["importance_ratio_mean"] = box.weight(r, bounded=False)[known]
                values["masked_fraction"] = (w == 0).float()
            for name in ("token_mult_prob_error", "gen_kl_error"):
                if known.any():
                    seen.setdefault(name + "_max", []).append(float(values[name].mean()))
        for name, value in values.items():
            seen.setdefault(name, []).extend(value.tolist())


def summary(box: Box, everything: list[Responses], seen: dict[str, list[Any]]) -> dict[str, float]:
    """The step's metrics: of the optimizer steps, and of all that was sampled."""
    means = {name: statistics.fmean(values) if values else 0.0 for name, values in seen.items()}
    ends = {name: max(values) for name, values in seen.items() if name.endswith("_max")}
    for name in {"ratio_mean", "importance_ratio_mean", "importance_weight_mean"} & seen.keys():
        ends[name.replace("mean", "max")] = max(seen[name])
        if name != "importance_weight_mean":
            ends[name.replace("mean", "min")] = min(seen[name])
    if "num_tokens" in seen:
        ends["num_tokens"] = sum(seen["num_tokens"])
    sampled = [r for group in everything for r in group]
    informative = statistics.fmean([differ([r.reward for r in group]) for group in everything])
    rewards = [r.reward for r in sampled]
    return {
        **means,
        **ends,
        "reward": statistics.fmean(rewards),
        "reward_std": deviation(rewards, 0),
        "accuracy": statistics.fmean([reward >= 1 for reward in rewards]),
        "response_length": statistics.fmean(map(len, sampled)),
        "truncated_fraction": statistics.fmean([r.truncated for r in sampled]),
        "turns": 1.0,
        "failed_fraction": 0.0,
        "informative_groups": informative,
        "groups_kept": informative if box.rounds else 1.0,
        **({"shaped_reward": statistics.fmean([r.shaped for r in sampled])} if box.shaped else {}),
    }


def clipped_at(low: float, high: float, dual: float | None = None):
    def clips(r: Response, s: Tensor) -> dict[str, Tensor]:
        A = torch.as_tensor(r.A)
        ends = {"low": (A < 0) & (s < 1 - low), "high": (A > 0) & (s > 1 + high)}
        return ends if dual is None else ends | {"dual": (A < 0) & (s > dual)}

    return clips


def outside(low: float, high: float):
    return lambda r, s: {"low": s < low, "high": s > high}


def ratio_value(r: Response) -> Tensor:
    """REINFORCE reports −A · ratio."""
    return -r.A * ratio(r)


BOXES = {
    # DeepSeekMath, algorithm 1 and equation 3: the mean over responses of the mean over tokens.
    "grpo": Box(kl=k3, kl_coef=0.04, clips=clipped_at(0.2, 0.2)),
    # "Understanding R1-Zero-Like Training", figure 1: neither |o| nor the deviation divides.
    "dr_grpo": Box(advantages=compared(scale="none"), reduce=constant, clips=clipped_at(0.2, 0.2)),
    # "Back to Basics", equation 7.
    "rloo": Box(
        advantages=compared("leave_one_out", "none"),
        policy=reinforce,
        reported=ratio_value,
        reduce=constant,
    ),
    "nemo_grpo": Box(
        advantages=compared("leave_one_out", "leave_one_out_std"),
        reduce=token_mean,
        kl=k3,
        kl_coef=0.01,
        clips=clipped_at(0.2, 0.2),
    ),
    # DAPO, algorithm 1, with the token mean of its code.
    "dapo": Box(
        policy=lambda r: ppo(r, 0.2, 0.28),
        reduce=token_mean,
        shaped=soft_punishment(0.2),
        filters=True,
        rounds=2,
        clips=clipped_at(0.2, 0.28),
    ),
    # GSPO, equation 5.
    "gspo": Box(
        policy=lambda r: ppo(r, 3e-4, 4e-4, s=sequence_ratio(r)),
        s=sequence_ratio,
        clips=clipped_at(3e-4, 4e-4),
    ),
    # MiniMax-M1, equations 4 and 5.
    "cispo": Box(policy=lambda r: cispo(r, 0.0, 5.0), reduce=token_mean, clips=outside(0.0, 5.0)),
    "sapo": Box(policy=soft_gate),
    "gmpo": Box(
        policy=lambda r: -r.A * geometric(r),
        s=geometric,
        clips=lambda r, s: clipped_at(1 - math.exp(-0.4), math.exp(0.4) - 1)(r, ratio(r)),
    ),
    # MaxRL, equation 10: score functions times (r − mean)/mean, 0 without a success.
    "max_rl": Box(
        advantages=compared(scale="group_mean"),
        policy=reinforce,
        reported=ratio_value,
        reduce=constant,
    ),
    "pass_at_k": Box(
        advantages=best_of(4), policy=reinforce, reported=ratio_value, reduce=constant
    ),
    # REINFORCE++, equations 4 to 6, with the token mean of OpenRLHF.
    "reinforce_plus_plus": Box(
        advantages=reinforce_plus_plus(0.01), reduce=token_mean, clips=clipped_at(0.2, 0.2)
    ),
}


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """The cases as parameters; all but the chosen ones are slow."""
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.slow) for case in cases]


SEVERAL = {"num_updates_per_batch": 2, "train_global_batch_size": 6}


def assert_agree(
    box: Box, folder: Path, monkeypatch, *, groups: Any = None, **options: Any
) -> Outcome:
    """Train by nemorl and by the oracle; compare weights and metrics."""
    box = replace(box, passes=options.get("num_updates_per_batch", 1))
    groups = groups or written(box.temperature)
    outcome = trained_by_nemorl(groups, folder, monkeypatch, **options)
    model, log = follow(box, groups, outcome.updates)
    assert len(log) == len(outcome.steps) == options.get("max_num_steps", STEPS)
    for found, expected in zip(outcome.steps, log, strict=True):
        of_no_sign = expected.pop("of_no_sign", 0.0)
        for name, value in expected.items():
            near = 2e-6 + of_no_sign * name.startswith("clip_fraction")
            assert found[name] == pytest.approx(value, rel=2e-4, abs=near), (found["step"], name)
        assert ("kl" in found) == (box.kl is not None and expected["num_updates"] > 0)
        assert ("shaped_reward" in found) == ("shaped_reward" in expected)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(outcome.weights[name], weight.detach(), **CLOSE)
    start = dict(first_model().named_parameters())
    assert any((start[n] - w).abs().max() > LR for n, w in outcome.weights.items())
    return outcome


def preset_agrees(name: str, folder: Path, monkeypatch, **updates: Any) -> None:
    more = {"max_num_steps": 5, "max_sampling_rounds": 2} if name == "dapo" else {}
    assert_agree(BOXES[name], folder, monkeypatch, preset=name, **updates, **more)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_the_algorithm_of_its_paper(name, tmp_path: Path, monkeypatch):
    preset_agrees(name, tmp_path, monkeypatch, **SEVERAL)


@pytest.mark.parametrize("name", quick(sorted(PRESETS), "dapo", "gspo", "reinforce_plus_plus"))
def test_a_preset_with_one_update_per_batch(name, tmp_path: Path, monkeypatch):
    preset_agrees(name, tmp_path, monkeypatch)


def test_a_step_without_an_informative_group_updates_nothing(tmp_path: Path, monkeypatch):
    """DAPO: shaping by length gives a rejected group advantages, from which it must not learn."""
    states: list[dict[str, Any]] = []

    class Watch(nemorl.Callback):
        def on_step_end(self, trainer, step, metrics) -> None:
            optimizer = trainer.trainer.optimizer
            states.append({"weights": dict(trainer.trainer.weights())} | optimizer.state)
            states[-1] = copy.deepcopy(states[-1])

    groups = written()
    options = {"preset": "dapo", "max_num_steps": 5, "max_sampling_rounds": 2, "samples": 12}
    outcome = trained_by_nemorl(groups, tmp_path, monkeypatch, callbacks=[Watch()], **options)
    assert [line["num_updates"] for line in outcome.steps] == [1, 1, 1, 0, 1]
    skipped = outcome.steps[3]
    assert skipped["informative_groups"] == skipped["groups_kept"] == skipped["grad_norm"] == 0
    assert skipped["shaped_reward"] < skipped["reward"]
    torch.testing.assert_close(list(states[2].values()), list(states[3].values()), rtol=0, atol=0)
    assert any(
        "step 4: all responses to each prompt had the same reward" in line
        for line in outcome.warnings
    )
    samples = samples_at(tmp_path, 4)
    assert all(not any(sample["advantages"]) for sample in samples)
    assert {round(s["shaped_reward"] - s["reward"], 6) for s in samples} == {0.0, -1.0}


LOSSES = {
    "clipped": (
        {"clip_low": 0.1, "clip_high": 0.15},
        Box(policy=lambda r: ppo(r, 0.1, 0.15), clips=clipped_at(0.1, 0.15)),
    ),
    "clipped-dual": (
        {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.05},
        Box(policy=lambda r: ppo(r, 0.1, 0.5, dual=1.05), clips=clipped_at(0.1, 0.5, 1.05)),
    ),
    "gspo": (
        {"clip_low": 0.02, "clip_high": 0.05},
        Box(
            policy=lambda r: ppo(r, 0.02, 0.05, s=sequence_ratio(r)),
            s=sequence_ratio,
            clips=clipped_at(0.02, 0.05),
        ),
    ),
    "gspo-token": (
        {"clip_low": 0.02, "clip_high": 0.05, "token_gradient": True},
        Box(
            policy=lambda r: ppo(r, 0.02, 0.05, s=sequence_token_ratio(r)),
            s=sequence_ratio,
            clips=clipped_at(0.02, 0.05),
        ),
    ),
    "cispo": (
        {"clip_high": 0.1},
        Box(policy=lambda r: cispo(r, 0.0, 1.1), clips=outside(0.0, 1.1)),
    ),
    "cispo-low": (
        {"clip_low": 0.1, "clip_high": 0.2},
        Box(policy=lambda r: cispo(r, 0.9, 1.2), clips=outside(0.9, 1.2)),
    ),
    "reinforce": ({}, Box(policy=reinforce, reported=ratio_value)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses(case, tmp_path: Path, monkeypatch):
    constants, box = LOSSES[case]
    loss = {"name": case.partition("-")[0], **constants}
    assert_agree(box, tmp_path, monkeypatch, loss=loss, **SEVERAL)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(reduction, tmp_path: Path, monkeypatch):
    """With responses that are filtered, of one group all."""
    box = Box(reduce=REDUCTIONS[reduction], filters=True)
    options = {"reduction": reduction, "overlong": {"filter": True}, **SEVERAL}
    assert_agree(box, tmp_path, monkeypatch, **options)


PAIRS = [
    ("group_mean", "group_std", 0),
    ("group_mean", "leave_one_out_std", 1),
    ("group_mean", "batch_std", 0),
    ("leave_one_out", "leave_one_out_std", 0),
    ("batch_mean", "batch_std", 1),
    ("none", "leave_one_out_std", 1),
    ("length_weighted", "none", 1),
]
BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none", "length_weighted")
SCALES = ("group_std", "leave_one_out_std", "batch_std", "none")
ALL_PAIRS = [*product(BASELINES, SCALES, (0, 1))]


@pytest.mark.parametrize("case", quick(ALL_PAIRS, *PAIRS), ids=str)
def test_baselines_and_scales(case, tmp_path: Path, monkeypatch):
    baseline, scale, ddof = case
    advantage = {"name": "group", "baseline": baseline, "scale": scale, "ddof": ddof}
    box = Box(advantages=compared(baseline, scale, ddof))
    assert_agree(box, tmp_path, monkeypatch, advantage=advantage)


@pytest.mark.parametrize(("kl_coef", "group_baseline"), [(0.0, True), (0.3, False), (0.3, True)])
def test_reinforce_plus_plus(kl_coef, group_baseline, tmp_path: Path, monkeypatch):
    name = "reinforce_plus_plus"
    advantage = {"name": name, "kl_coef": kl_coef, "group_baseline": group_baseline}
    box = Box(advantages=reinforce_plus_plus(kl_coef, group_baseline), filters=True)
    options = {"advantage": advantage, "overlong": {"filter": True}, **SEVERAL}
    assert_agree(box, tmp_path, monkeypatch, **options)


FACTORS = {
    "pathwise": None,
    "score": lambda r: (r.now - r.now.detach()).exp(),
    "importance": lambda r: (r.now - r.sampled).exp(),
}


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
PENALTIES = [*product(ESTIMATORS, FACTORS)]
QUICK_PENALTIES = [("k1", "score"), ("k2", "pathwise"), ("k3", "importance")]


@pytest.mark.parametrize("case", quick(PENALTIES, *QUICK_PENALTIES), ids=str)
def test_kl(case, tmp_path: Path, monkeypatch):
    estimator, gradient = case
    box = Box(kl=ESTIMATORS[estimator], kl_coef=0.5, kl_factor=FACTORS[gradient])
    kl = {"coef": 0.5, "estimator": estimator, "gradient": gradient}
    assert_agree(box, tmp_path, monkeypatch, kl=kl)


def off_policy(mode: str, level: str, low: float, high: float):
    """w = π_old / π_sampler of the token, the sequence, or its geometric mean."""

    def weight(r: Response, *, bounded: bool = True) -> Tensor:
        known = r.sampled.isfinite()
        gap = torch.where(known, r.old - r.sampled, 0.0)
        mean = (gap.sum() / max(1, int(known.sum()))).exp().expand(len(r))
        w = {"token": gap.exp(), "sequence": gap.sum().exp().expand(len(r)), "geometric": mean}
        if not bounded:
            return w[level]
        judged = mean if mode == "sequence_mask" else w[level]
        kept = known & ((judged >= low) & (judged <= high) | (mode == "truncate"))
        return torch.where(kept, w[level].clamp(low, high) if mode == "truncate" else w[level], 0.0)

    return weight


LEVELS = ("token", "sequence", "geometric")


MODES = ("truncate", "mask", "sequence_mask")
CORRECTIONS = [*product(MODES, LEVELS)]
QUICK_CORRECTIONS = [
    ("truncate", "token"),
    ("truncate", "sequence"),
    ("mask", "token"),
    ("mask", "geometric"),
    ("sequence_mask", "sequence"),
]


@pytest.mark.parametrize("case", quick(CORRECTIONS, *QUICK_CORRECTIONS), ids=str)
def test_off_policy_corrections(case, tmp_path: Path, monkeypatch):
    """The correction multiplies the policy's loss and not the penalty; denominators stay."""
    mode, level = case
    section = {"mode": mode, "level": level, "min": 0.8, "max": 1.2}
    box = Box(weight=off_policy(mode, level, 0.8, 1.2), kl=k3, kl_coef=0.1, reduce=token_mean)
    options = {"off_policy": section, "kl": {"coef": 0.1}, "reduction": "token_mean", **SEVERAL}
    assert_agree(box, tmp_path, monkeypatch, **options)


@pytest.mark.parametrize("level", quick(LEVELS, "sequence"))
def test_tokens_without_a_sampler_logprob(level, tmp_path: Path, monkeypatch):
    """They are left out by the correction and by a penalty that needs it."""
    groups = written()
    for n, value in ((0, math.nan), (2, -math.inf), (7, math.nan), (9, math.inf)):
        for r in groups[n][:3]:
            r.sampled[-1:] = value

    def factor(r: Response) -> Tensor:
        known = r.sampled.isfinite()
        return (r.now - r.sampled.where(known, torch.tensor(0.0))).exp() * known

    section = {"mode": "truncate", "level": level, "min": 0.8, "max": 1.2}
    box = Box(weight=off_policy("truncate", level, 0.8, 1.2), kl=k3, kl_coef=0.1, kl_factor=factor)
    kl = {"coef": 0.1, "gradient": "importance"}
    options = {"off_policy": section, "kl": kl, **SEVERAL}
    assert_agree(box, tmp_path, monkeypatch, groups=groups, **options)


def test_a_run_that_never_learns_keeps_its_weights(tmp_path: Path, monkeypatch):
    groups = written()
    for r in (r for group in groups for r in group):
        r.reward = 0.1
    outcome = trained_by_nemorl(groups, tmp_path, monkeypatch, max_num_steps=1)
    torch.testing.assert_close(
        outcome.weights, dict(first_model().named_parameters()), rtol=0, atol=0
    )
    warned = [json.loads(line) for line in outcome.warnings if '"WARNING"' in line.upper()]
    assert ["step 1: all responses had the reward 0.1," in line["message"] for line in warned] == [
        True
    ], warned


def test_a_batch_of_empty_responses_updates_nothing(tmp_path: Path, monkeypatch):
    groups = written()
    for r in (r for group in groups[3:6] for r in group):
        r.tokens, r.sampled, r.reward = [], torch.zeros(0), float(r.number)
    box = Box(kl=k3, kl_coef=0.1, entropy_coef=0.1)
    options = {"kl": {"coef": 0.1}, "entropy_coef": 0.1}
    outcome = assert_agree(box, tmp_path, monkeypatch, groups=groups, **options)
    assert [line["num_updates"] for line in outcome.steps] == [1, 0, 1, 1]


@pytest.mark.parametrize("passes", [1, 3])
def test_entropy_bonus_and_temperature(passes, tmp_path: Path, monkeypatch):
    box = Box(entropy_coef=0.3, temperature=0.7)
    options = {"entropy_coef": 0.3, "generation": {"temperature": 0.7}}
    assert_agree(box, tmp_path, monkeypatch, num_updates_per_batch=passes, **options)


def test_shaping_by_length_without_dynamic_sampling(tmp_path: Path, monkeypatch):
    """It teaches also where the rewards before it are all equal."""
    box = Box(shaped=soft_punishment(0.6, 0.5))
    options = {"overlong": {"buffer": 0.6, "penalty": 0.5}}
    outcome = assert_agree(box, tmp_path, monkeypatch, **options)
    assert outcome.steps[1]["informative_groups"] == 0 < outcome.steps[1]["num_updates"]


def test_minibatches_of_uneven_size(tmp_path: Path, monkeypatch):
    """One of them has but responses that are filtered, and is left out."""
    box = replace(BOXES["dapo"], shaped=None, rounds=1)
    options = {"overlong": {"buffer": 0.0}, "max_sampling_rounds": 1}
    sizes = {"num_updates_per_batch": 2, "train_global_batch_size": 3}
    assert_agree(box, tmp_path, monkeypatch, preset="dapo", **options, **sizes)


def test_packed_microbatches(tmp_path: Path, monkeypatch):
    trainer = {"sequence_packing": True, "packed_row_tokens": 16, "train_micro_batch_size": 2}
    box = LOSSES["gspo"][1]
    loss = {"name": "gspo", "clip_low": 0.02, "clip_high": 0.05}
    assert_agree(box, tmp_path, monkeypatch, loss=loss, trainer=trainer, **SEVERAL)


def test_weighted_rewards(tmp_path: Path, monkeypatch):
    """Their sum is compared."""
    groups = written()
    by_text = {prompt_text(n): group for n, group in enumerate(groups)}

    def right(prompt, response) -> float:
        return by_text[prompt][int(response)].reward

    def brief(prompt, response) -> float:
        return -float(len(by_text[prompt][int(response)]))

    options = {"rewards": [right, brief], "reward_weights": (2.0, 0.25)}
    outcome = trained_by_nemorl(groups, tmp_path, monkeypatch, **options)
    for group in groups:
        for r in group:
            r.reward = 2 * r.reward - 0.25 * len(r)
    model, log = follow(Box(), groups, outcome.updates)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(outcome.weights[name], weight.detach(), **CLOSE)
    for found, expected in zip(outcome.steps, log, strict=True):
        assert found["reward"] == pytest.approx(expected["reward"])


def drawn(seed: int) -> tuple[Box, dict[str, Any]]:
    """One of each option's values, and their box."""
    draw = random.Random(seed)

    def one(*values: Any) -> Any:
        return draw.choice(values)

    case = draw.choice(list(LOSSES))
    constants, box = LOSSES[case]
    options: dict[str, Any] = {"loss": {"name": case.partition("-")[0], **constants}}
    if one(True, True, False):
        baseline, scale, ddof = draw.choice(ALL_PAIRS)
        advantages = compared(baseline, scale, ddof)
        options["advantage"] = {"baseline": baseline, "scale": scale, "ddof": ddof}
    else:
        kl_coef, group_baseline = one(0.0, 0.2), one(True, False)
        advantages = reinforce_plus_plus(kl_coef, group_baseline)
        options["advantage"] = {
            "name": "reinforce_plus_plus",
            "kl_coef": kl_coef,
            "group_baseline": group_baseline,
        }
    reduction, buffer, filters = draw.choice(list(REDUCTIONS)), one(0.0, 0.4), one(True, False)
    box = replace(box, advantages=advantages, reduce=REDUCTIONS[reduction], filters=filters)
    options |= {"reduction": reduction, "overlong": {"buffer": buffer, "filter": filters}}
    if buffer:
        box = replace(box, shaped=soft_punishment(buffer))
    if one(True, False):
        estimator, gradient = draw.choice(PENALTIES)
        box = replace(box, kl=ESTIMATORS[estimator], kl_coef=0.2, kl_factor=FACTORS[gradient])
        options["kl"] = {"coef": 0.2, "estimator": estimator, "gradient": gradient}
    if one(True, False):
        mode, level = draw.choice(CORRECTIONS)
        box = replace(box, weight=off_policy(mode, level, 0.7, 1.3))
        options["off_policy"] = {"mode": mode, "level": level, "min": 0.7, "max": 1.3}
    if one(True, False):
        box = replace(box, rounds=2)
        options |= {"dynamic_sampling": True, "max_sampling_rounds": 2, "max_num_steps": 5}
    box = replace(box, entropy_coef=one(0.0, 0.2), temperature=one(1.0, 0.8))
    options |= {
        "entropy_coef": box.entropy_coef,
        "generation": {"temperature": box.temperature},
        "num_updates_per_batch": one(1, 2),
        "train_global_batch_size": one(None, 4, 6),
        "trainer": one({}, {"train_micro_batch_size": 3}, {"sequence_packing": True}),
    }
    return box, options


@pytest.mark.parametrize("seed", quick(range(60), 0, 2))
def test_combinations(seed, tmp_path: Path, monkeypatch):
    box, options = drawn(seed)
    assert_agree(box, tmp_path, monkeypatch, **options)
