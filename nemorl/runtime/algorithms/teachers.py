"""The teachers of distillation: what they say of a student's tokens, and the loss of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemorl.checks import closest, require
from nemorl.data.batch import Example, TokenBatch, collate, pad, take
from nemorl.data.datasets import prompt_of, to_prompts
from nemorl.data.packing import pack, segments_apart
from nemorl.data.rows import first_of, for_rows
from nemorl.losses import LogprobKind, LossOutput, Mean, distillation_topk, needs, opd
from nemorl.models import hub
from nemorl.models.source import ModelSource
from nemorl.parallel.backend import ForwardOutput, LossFn, Needs
from nemorl.rollout.episodes import with_environment_tools
from nemorl.rollout.judge import ScoreServer, ask
from nemorl.runtime.algorithms import policy_loss
from nemorl.runtime.config.distill import LIVE, DistillConfig, TopTokens
from nemorl.runtime.run.launch import generation_config, model_config_of
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.parts import live_engine

Said = tuple[Int[Tensor, "batch seq k"], Float[Tensor, "batch seq k"]]
"""The tokens that a teacher compares at each place, and its log-probabilities of them."""


class Teachers:
    """The teachers of a run, by name. A row may choose one by its column `teacher`, and have a
    prompt for it, `teacher_prompt`.
    """

    def __init__(self, run: Run[DistillConfig], stack: ExitStack) -> None:
        self.run, self.config, self.stack = run, run.config.teacher, stack
        self.kind, kind = LogprobKind(run.config.generation.temperature), run.config.distillation
        self.top_k = 0
        """0: only the sampled token."""
        if isinstance(kind, TopTokens):
            most = run.launch.of_model.vocab_size
            self.top_k = min(kind.top_k or most, most)
        self.rows = first_of(run.rows)
        for_rows(self.rows, self.check_row)
        found = {name: self.checked(model) for name, model in self.config.models.items()}
        self.scorers = {name: self.load(name, model) for name, model in found.items()}

    def check_row(self, row: Any) -> None:
        """Refuse a row without a teacher, or without a prompt where the student teaches itself."""
        models, name = self.config.models, str(row.get("teacher"))
        if "" in models:
            name = ""
        must, remedy = f"must be one of {', '.join(models)}", f"name one{closest(name, models)}"
        require(name in models, "the column teacher", must, name, remedy)
        require(
            row.get("teacher_prompt") is not None or models[name] not in (None, LIVE),
            "the column teacher_prompt",
            "must be given where the student teaches itself",
            None,
            "add it, or --teacher.model",
        )

    def checked(self, model: str | None) -> str | ScoreServer | None:
        """Return a teacher's folder or server; None and LIVE stand for the student. Refuse one that
        reads other tokens, or too few.
        """
        if model in (None, LIVE):
            return model
        found: Any
        positions: int | None
        read: Callable[[str], Sequence[int]]
        if model.startswith("http"):
            found, positions = ask(ScoreServer.find(model))
            read = found.tokens
        else:
            found, trust = hub.model_folder(model), self.run.config.model.trust_remote_code
            read = hub.reader(hub.load_tokenizer(found, trust_remote_code=trust))
            of_model = model_config_of(found, trust_remote_code=trust)
            positions = of_model and hub.max_positions(of_model)
        field, prompts = f"teacher.model {model}", self.prompts(self.rows[:3])
        told = [row for row in self.rows if row.get("teacher_prompt") is not None]
        pairs = zip(self.prompts(told, told=True), self.prompts(told), strict=True)
        longest = self.run.config.data.max_total_sequence_length
        longest += max([0, *(len(ids) - len(own) for ids, own in pairs)])
        must = f"must have {longest} positions, for the longest row"
        require(longest <= (positions or longest), field, must, positions, "shorten the rows")
        hub.require_same_tokens(
            field, self.run.tokenizer, read, [self.run.tokenizer.decode(ids) for ids in prompts]
        )
        if isinstance(found, ScoreServer):
            ask(found.score(prompts, top_k=self.top_k, kind=self.kind))
        return found

    def load(self, name: str, model: str | ScoreServer | None) -> Callable[[TokenBatch], Said]:
        """Return what scores a batch of single sequences."""
        run, config = self.run, self.run.config
        if isinstance(model, ScoreServer):
            return partial(self.scored, model)
        if model == LIVE:
            return lambda batch: self.computed(run.trainer, batch)
        if model is None or self.config.engine is None:
            made: Any = {"trains": False, "own_ranks": self.config.own_devices}
            name = f"teacher_{name}" if name else "teacher"
            return partial(self.computed, run.backend(name, model=model, **made))
        shares, trust = not self.config.own_devices, config.model.trust_remote_code
        config = replace(
            config,
            generation=replace(config.generation, backend=self.config.engine, colocated=shares),
        )
        engines = generation_config(config, run.launch.directory, run.launch.devices)
        source = ModelSource(model, device=config.trainer.device, trust_remote_code=trust)
        engine = self.stack.enter_context(live_engine(run.others, engines, model=source))
        engine.sleep()
        return partial(self.scored, engine)

    def computed(self, backend: Any, batch: TokenBatch) -> Said:
        """Return what a training backend says."""
        if not self.top_k:
            return batch.input_ids[..., None], backend.get_logprobs(batch).values[..., None]
        found = backend.compute(batch, Needs(top_k=self.top_k))
        return found.top_ids, found.top_logprobs

    def scored(self, engine: Any, batch: TokenBatch) -> Said:
        """Return what a server, or an engine awake for this alone, says."""
        rows = zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True)
        sequences, sleeps = [ids[:n] for ids, n in rows], hasattr(engine, "sleep")
        if sleeps:
            self.run.make_room()
            engine.wake()
        found = ask(engine.score(sequences, top_k=self.top_k, kind=self.kind))
        if sleeps:
            engine.sleep()
        length = batch.input_ids.shape[1]
        arrays = [found.token_logprobs, *[found.top_logprobs, found.top_ids] * (self.top_k > 0)]
        logprobs, *top = (
            pad([torch.as_tensor(each) for each in part], value=0, length=length)[0]
            for part in arrays
        )
        if not top:
            return batch.input_ids[..., None], logprobs[..., None]
        return top[1].long(), top[0]

    def __call__(self, batch: TokenBatch, rows: Sequence[Any]) -> TokenBatch:
        """Add what the teachers of a batch's rows say, as `target_ids` and `teacher_logprobs`."""
        for_rows(rows, self.check_row)
        apart, plan = segments_apart(replace(batch, sampled_hashes=None))
        of = [row for row, segments in zip(rows, plan, strict=True) for _ in segments]
        seen, later = self.seen(apart, of)
        order, said = list[int](), list[Said]()
        for name, score in self.scorers.items():
            mine = [i for i, row in enumerate(of) if not name or row["teacher"] == name]
            if mine:
                order += mine
                said.append(score(take(seen, mine)))
        back = torch.tensor(order).argsort()
        place = torch.arange(apart.input_ids.shape[1]) + later[:, None]
        place = place.clamp(0, seen.input_ids.shape[1] - 1)[..., None]
        ids, logprobs = (
            torch.cat(parts)[back].gather(1, place.expand(-1, -1, parts[0].shape[-1]))
            for parts in zip(*said, strict=True)
        )
        inside = apart.response_mask[..., None]
        ids, logprobs = ids.where(inside, 0), logprobs.where(inside, -torch.inf)
        packed = pack(replace(apart, target_ids=ids, teacher_logprobs=logprobs), plan)
        given: Any = {name: vars(packed)[name] for name in ("target_ids", "teacher_logprobs")}
        return replace(batch, **given)

    def seen(
        self, batch: TokenBatch, rows: Sequence[Any]
    ) -> tuple[TokenBatch, Int[Tensor, "batch"]]:
        """Return a batch of single sequences under the teachers' prompts, and how many tokens later
        each response stands there.
        """
        if all(row.get("teacher_prompt") is None for row in rows):
            return batch, torch.zeros(len(rows), dtype=torch.long)
        examples, later = list[Example](), list[int]()
        samples, own = self.run.config.on_policy, self.prompts(rows)
        begins = batch.response_mask.long().argmax(-1).tolist()
        for i, told in enumerate(self.prompts(rows, told=True)):
            begin, length = begins[i], int(batch.lengths[i])
            ids = batch.input_ids[i, :length].tolist()
            if samples and ids[:begin] != own[i]:
                raise RuntimeError(
                    "teacher_prompt takes the place of a row's prompt, but a conversation has"
                    " rewritten or cut that: omit it"
                )
            mask = [False] * len(told) + [True] * (length - begin)
            ids = [*told, *ids[begin:]]
            examples.append(Example(input_ids=ids, loss_mask=mask, response_mask=mask))
            later.append(len(told) - begin)
        return collate(examples, logprob_kind=batch.logprob_kind), torch.tensor(later)

    def prompts(self, rows: Sequence[Any], *, told: bool = False) -> Sequence[Sequence[int]]:
        """Return the tokens of rows' prompts, or of teachers': in a chat the user's message."""

        def for_teacher(row: Any) -> Any:
            prompt = row.get("teacher_prompt")
            if isinstance(prompt, str) and not isinstance(own := prompt_of(row), str):
                before = [each for each in own if each["role"] in ("system", "developer")]
                prompt = [*before, {"role": "user", "content": prompt}]
            return row if prompt is None else row.but(prompt=prompt)

        rows, tokenizer = for_rows(rows, for_teacher) if told else rows, self.run.tokenizer
        return to_prompts(with_environment_tools(self.run.environment, rows, tokenizer), tokenizer)


@contextmanager
def open_teachers(run: Run[DistillConfig]) -> Iterator[Teachers]:
    """Check the teachers, and have them score in the block."""
    with ExitStack() as stack:
        yield Teachers(run, stack)


def make_loss(config: DistillConfig) -> LossFn:
    """Return the configured loss of a part of a batch that teachers have scored."""
    kind, top, samples = config.distillation, None, config.on_policy
    entropy = samples and config.entropy_coef is not None
    if isinstance(kind, TopTokens):
        top = {name: getattr(kind, name) for name in ("direction", "mix", "outside")}
        top["temperature"] = config.generation.temperature
        entropy |= kind.outside == "zero"
    of_policy = policy_loss.make_loss(config) if samples else None
    return needs(entropy=entropy, targets=top is not None)(
        partial(distillation_loss, policy=of_policy, top=top, coef=kind.coef)
    )


def distillation_loss(
    output: ForwardOutput,
    batch: TokenBatch,
    *,
    policy: LossFn | None,
    top: Mapping[str, Any] | None,
    coef: float,
) -> LossOutput:
    """Return the policy loss of advantages + coef · (log π_teacher − log π_prev), or with `top`,
    keywords of `distillation_topk`, plus coef · that divergence.
    """
    assert batch.loss_weights is not None and batch.teacher_logprobs is not None
    if top is not None:
        assert batch.target_ids is not None
        result = distillation_topk(
            output.target_logprobs,
            output.target_rest_logprobs,
            batch.target_ids,
            batch.teacher_logprobs,
            coef * batch.loss_weights,
            entropy=output.entropy if top["outside"] == "zero" else None,
            **top,
        )
        return result if policy is None else result + policy(output, batch)
    assert policy is not None and batch.advantages is not None
    now = output.token_logprobs.detach() if batch.prev_logprobs is None else batch.prev_logprobs
    mask = batch.loss_weights != 0
    better = opd(batch.teacher_logprobs[..., 0], now, mask)
    result = policy(output, replace(batch, advantages=batch.advantages + coef * better))
    gap = {"divergence": Mean(-better.sum(), mask.sum().float())}
    return replace(result, metrics={**result.metrics, **gap})
