"""Classes with few methods as whole generation backends: `as_generation_backend`."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.checks import has_own, require
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind
from nemorl.models.source import ModelSource
from nemorl.rollout.calls import accepted, blocking
from nemorl.rollout.collect import kind_of
from nemorl.rollout.generation import (
    Completion,
    GenerationBackend,
    GenerationTraits,
    InFlight,
    SamplingParams,
    Scores,
    WeightSource,
    check_scored,
    checked_requests,
    text_before,
)
from nemorl.rollout.random import derive_seed
from nemorl.rollout.scheduler import Request, ScheduledBackend, unmasked
from nemorl.rollout.torch_backend import copy_weights, scored

NEEDED = ("setup", "update_weights", "shutdown")
ANSWER = ("token_ids", "text", "logprobs", "finish_reason")
"""What a response may have that `generate` returns as a dict."""
Sample = tuple[Request, int, SamplingParams]
"""A request, the number of its sample, and the call's parameters."""


def as_generation_backend(target: Any) -> Any:
    """Return a class or instance as a whole `GenerationBackend`.

    A class with `sample` gets `generate`, `sleep`, `wake`, `metrics` and `sleeps` if it lacks them,
    and a `score` that raises; one without is wrapped (`WrappedBackend`). Raises: ValueError that
    names what is missing.

    >>> class Half:
    ...     def setup(self, config): ...
    >>> as_generation_backend(Half)
    Traceback (most recent call last):
    ValueError: a generation backend must have the methods setup, update_weights, shutdown, ...
    """
    names = (*NEEDED, "sample", *_OPTIONAL)
    own = {name for name in names if has_own(target, name, GenerationBackend)}
    missing = [name for name in NEEDED if name not in own]
    if not own & {"sample", "generate"}:
        missing.append("sample (or generate)")
    name = getattr(target, "__name__", type(target).__name__)
    if missing:
        raise ValueError(
            f"a generation backend must have the methods {', '.join(NEEDED)}, and sample or"
            f" generate, but {name} has no {', '.join(missing)}: add what is missing"
        )
    if "sample" not in own:
        if not isinstance(target, type):
            return WrappedBackend(target)
        made: Any = partial(WrappedBackend, target)
        made.traits = getattr(target, "traits", GenerationTraits())
        return made
    added = {key: method for key, method in _OPTIONAL.items() if key not in own}
    if not hasattr(target, "sleeps"):
        added["sleeps"] = True
    if isinstance(target, type):
        return type(name, (target,), added) if added else target
    for key, each in added.items():
        setattr(target, key, MethodType(each, target) if callable(each) else each)
    return target


class WrappedBackend(ScheduledBackend):
    """A class with only `setup(config)`, `generate(prompts, sampling_params)`,
    `update_weights(state_dict)` and `shutdown()`, whole.

    Requests that wait and are alike are one call of `generate`: a prompt (token ids; texts where
    the parameter is annotated as `list[str]`) for each completion, and one `SamplingParams` with
    n = 1 and no seed. torch's generator is seeded from the requests.

    It returns for each prompt a `Completion`, a dict (token_ids or text; logprobs, finish_reason)
    or a text, which is tokenized again. Missing logprobs are computed by `model`.
    """

    def __init__(
        self, inner: Any, *, model: Any = None, tokenizer: Any = None, precision: str = "float32"
    ) -> None:
        source = ModelSource.of(model)
        if isinstance(inner, type):
            offered = {"model": source, "tokenizer": tokenizer, "precision": precision}
            inner = inner(**accepted(inner, offered))
        super().__init__(self._step, tokenizer)
        self.limits(source.config)
        self.inner, self.name, self.precision = inner, type(inner).__name__, precision
        traits = getattr(inner, "traits", GenerationTraits())
        self.model: Any = source.load() if model is not None and traits.shares_model else None
        self.max_batch_size = 256
        self._waiting: list[Sample] = []
        parameters = list(inspect.signature(inner.generate).parameters.values())
        self._texts = "str" in str(parameters[0].annotation) if parameters else False

    def setup(self, config: Any) -> None:
        self.max_batch_size = getattr(config, "max_batch_size", self.max_batch_size)
        self.inner.setup(config)

    async def update_weights(self, source: WeightSource, *, in_flight: InFlight = "keep") -> int:
        version, weights = source.newest()
        with self._scheduler.updating(version, in_flight):
            state = dict(weights)
            update = self.inner.update_weights
            update(state, **accepted(update, {"version": version}))
            if isinstance(self.model, nn.Module):
                copy_weights(self.model, state.items(), version)
        return version

    async def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        top_k: int = 0,
        kind: LogprobKind | None = None,
    ) -> Scores:
        """Return the class's own `score`, or the scores of the `model` that is here."""
        if not has_own(self.inner, "score", GenerationBackend):
            return await super().score(token_ids, top_k=top_k, kind=kind)
        self._scheduler.check()
        check_scored(token_ids, top_k, **self.sizes)
        return await self.inner.score(token_ids, top_k=top_k, kind=kind)

    def sleep(self) -> None:
        with self._scheduler.lock:
            self._optional("sleep")
            self._scheduler.asleep = True

    def wake(self) -> None:
        self._optional("wake")
        super().wake()

    def metrics(self) -> dict[str, float]:
        return self._optional("metrics") or {}

    def _optional(self, name: str) -> Any:
        return getattr(self.inner, name)() if has_own(self.inner, name, GenerationBackend) else None

    def shutdown(self) -> None:
        with self._scheduler.lock:
            if not self._scheduler.closed:
                self.inner.shutdown()
            super().shutdown()
            self.model = None

    def _step(self, new: list[Request], dropped: list[Request]) -> None:
        for request in new:
            alike = replace(request.params, n=1, seed=None)
            self._waiting += [(request, j, alike) for j in range(request.params.n)]
        self._waiting = [each for each in self._waiting if not each[0].future.done()]
        if not self._waiting:
            return
        params = self._waiting[0][2]
        batch = [each for each in self._waiting if each[2] == params][: self.max_batch_size]
        taken = set(batch)
        self._waiting = [each for each in self._waiting if each not in taken]
        for (request, *_), completion in zip(batch, self._called(batch, params), strict=True):
            request.parts.append(completion)
            if len(request.parts) == request.params.n:
                request.answer(request.parts)

    def _called(self, batch: Sequence[Sample], params: SamplingParams) -> list[Completion]:
        given: list[Any] = [list(request.prompt) for request, *_ in batch]
        if self._texts:
            given = self._tokenizer("to call it with texts").batch_decode(given)
        seeds = [number for request, j, _ in batch for number in (request.params.seed or 0, j)]
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(derive_seed(*seeds))
            found = self.inner.generate(given, params)
        if isinstance(found, Mapping):  # of columns
            rows = zip(*found.values(), strict=True)
            found = [dict(zip(found, row, strict=True)) for row in rows]
        found = list(found)
        require(
            len(found) == len(batch),
            f"{self.name}.generate",
            f"must return one response for each of {len(batch)} prompts",
            len(found),
            "return them in the prompts' order; sampling_params.n is 1",
        )
        return [
            self._completion(one, request.prompt, params)
            for one, (request, *_) in zip(found, batch, strict=True)
        ]

    def _completion(self, found: Any, prompt: Sequence[int], params: SamplingParams) -> Completion:
        if isinstance(found, Completion):
            found = {part: getattr(found, part) for part in ANSWER}
        parts = {"text": found} if isinstance(found, str) else found
        generate = f"{self.name}.generate"
        must = f"must return texts, Completions or dicts of {', '.join(ANSWER)}"
        known = isinstance(parts, Mapping) and set(parts) <= set(ANSWER)
        known = known and not {"token_ids", "text"}.isdisjoint(parts)
        require(known, generate, must, found, "a dict needs token_ids or text")
        ids, text, logprobs, reason = map(parts.get, ANSWER)
        if ids is None:
            ids = self._tokenizer("to train on texts")(text, add_special_tokens=False)["input_ids"]
        ids = tuple(int(token) for token in ids)
        if text is None:
            decoder = self.tokenizer
            text = "" if decoder is None else decoder.decode(ids, skip_special_tokens=True)
        if logprobs is None:
            batch = unmasked([[*prompt, *ids]], kind_of(params))
            logprobs = self._scored(batch, 0)[0][0, len(prompt) :].tolist() if ids else ()
        require(
            len(logprobs) == len(ids),
            generate,
            f"must return a logprob for each of {len(ids)} tokens",
            len(logprobs),
            "return None where there is none",
        )
        if reason is None:
            reason = "length" if len(ids) >= params.max_new_tokens else "stop"
        require(
            reason in ("stop", "length"),
            f"{generate}'s finish_reason",
            "must be stop or length",
            reason,
            "omit it",
        )
        before = text_before(params.stop_strings, text)
        stopped = before != text or (bool(ids) and ids[-1] in params.stop_token_ids)
        require(
            reason == "length" or stopped or not params.ignore_eos,
            f"a response of {generate}",
            f"must have {params.max_new_tokens} tokens where generation.ignore_eos is true",
            len(ids),
            "obey sampling_params.ignore_eos there, or remove the setting",
        )
        return Completion(
            token_ids=ids,
            logprobs=tuple(map(float, logprobs)),
            finish_reason=reason,
            text=before,
            policy_versions=(self.policy_version or 0,) * len(ids),
            tokenizer=self.tokenizer,
        )

    def _tokenizer(self, purpose: str) -> Any:
        require(
            self.tokenizer is not None,
            self.name,
            f"needs a tokenizer {purpose}",
            self.tokenizer,
            "give the backend one, or take and return token ids",
        )
        return self.tokenizer

    def _scored(self, batch: TokenBatch, top_k: int) -> Sequence[Tensor]:
        if not isinstance(self.model, nn.Module):
            raise ValueError(
                f"{self.name} must have the method score, or generate return logprobs, because"
                " there is no model here to compute them with: add score, return dicts with"
                " token_ids and logprobs, or remove shares_model=False from its traits"
            )
        return scored(self.model, batch, top_k, precision=self.precision)


def _nothing(*_: Any) -> None: ...


def _generate(self: Any, prompts: Any, sampling_params: Any) -> list[Completion]:
    most = sys.maxsize
    params = checked_requests(prompts, sampling_params, vocab_size=most, max_positions=most)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*map(self.sample, prompts, params))

    return [completion for answer in blocking(all_of_them()) for completion in answer]


async def _score(self: Any, token_ids: Any, *, top_k: int = 0, kind: Any = None) -> Scores:
    raise ValueError(
        f"{type(self).__name__} must have the method score to give log-probabilities of tokens:"
        " add async def score(self, token_ids, *, top_k=0, kind=None) -> nemorl.Scores"
    )


_OPTIONAL: dict[str, Any] = {
    "score": _score,
    "generate": _generate,
    "sleep": _nothing,
    "wake": _nothing,
    "metrics": lambda self: {},
}
