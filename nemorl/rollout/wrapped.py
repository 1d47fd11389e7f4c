"""Classes with few methods as whole generation backends: `as_generation_backend`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isnan, nan
from types import MethodType
from typing import Any

import torch
from torch import nn

from nemorl.checks import require
from nemorl.losses.logprobs import filter_logits
from nemorl.models.source import ModelSource
from nemorl.rollout.calls import blocking
from nemorl.rollout.decoding import FILTERS_OFF
from nemorl.rollout.generation import (
    Completion,
    GenerationBackend,
    GenerationTraits,
    InFlight,
    SamplingParams,
    WeightSource,
    text_before,
)
from nemorl.rollout.random import derive_seed
from nemorl.rollout.scheduler import Request, ScheduledBackend
from nemorl.rollout.torch_backend import copy_weights

NEEDED = ("setup", "update_weights", "shutdown")
ANSWER = ("token_ids", "text", "logprobs", "finish_reason")
"""What a response may have that `generate` returns as a dict."""


def as_generation_backend(target: Any) -> Any:
    """Return a class or instance as a whole `GenerationBackend`.

    A class with `sample` gets `generate`, `sleep`, `wake` and `metrics` where it has none. One that
    has only `setup(config)`, `generate(prompts, sampling_params)`, `update_weights(state_dict)` and
    `shutdown()` is wrapped: see `WrappedBackend`. Raises: ValueError that names what is missing.

    >>> class Half:
    ...     def setup(self, config): ...
    >>> as_generation_backend(Half)
    Traceback (most recent call last):
    ValueError: a generation backend must have the methods setup, update_weights, shutdown, ...
    """
    own = {name for name in (*NEEDED, "sample", *_OPTIONAL) if _has(target, name)}
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
    if isinstance(target, type):
        return type(name, (target,), added) if added else target
    for key, method in added.items():
        setattr(target, key, MethodType(method, target))
    return target


class WrappedBackend(ScheduledBackend):
    """A class with only `setup`, `generate`, `update_weights` and `shutdown`, whole.

    Requests that wait and are alike are one call, `generate(prompts, sampling_params)`: a prompt
    (token ids; texts where the parameter is annotated as `list[str]`) for each completion, and one
    `SamplingParams` with n = 1 and no seed. torch's generator is seeded from the requests.

    It returns for each prompt a `Completion`, a dict (token_ids or text; logprobs, finish_reason)
    or a text, which is tokenized again. Missing logprobs are computed by `model`.
    """

    def __init__(
        self, inner: Any, *, model: Any = None, tokenizer: Any = None, precision: str = "float32"
    ) -> None:
        source = ModelSource.of(model)
        if isinstance(inner, type):
            offered = {"model": source, "tokenizer": tokenizer, "precision": precision}
            inner = inner(**_accepted(inner, offered))
        super().__init__(self._step, tokenizer)
        self.limits(source.config)
        self.inner, self.precision = inner, precision
        traits = getattr(inner, "traits", GenerationTraits())
        shared = model is not None and traits.shares_model
        self.model: Any = source.load() if shared else None
        self.max_batch_size = 256
        self._waiting: list[tuple[Request, int]] = []
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
            update(state, **_accepted(update, {"version": version}))
            if isinstance(self.model, nn.Module):
                copy_weights(self.model, state.items(), version)
        return version

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
        return getattr(self.inner, name)() if _has(self.inner, name) else None

    def shutdown(self) -> None:
        with self._scheduler.lock:
            if not self._scheduler.closed:
                self.inner.shutdown()
            super().shutdown()
            self._waiting, self.model = [], None

    def _step(self, new: list[Request], dropped: list[Request]) -> None:
        self._waiting += [(request, j) for request in new for j in range(request.params.n)]
        gone = set(dropped)
        self._waiting = [one for one in self._waiting if one[0] not in gone]
        if not self._waiting:
            return
        alike = _batch_params(self._waiting[0][0])
        batch = [one for one in self._waiting if _batch_params(one[0]) == alike]
        batch = batch[: self.max_batch_size]
        taken = set(batch)
        self._waiting = [one for one in self._waiting if one not in taken]
        try:
            completions = self._called(batch, alike)
        except BaseException:
            self._waiting = []
            raise
        for (request, _), completion in zip(batch, completions, strict=True):
            request.parts.append(completion)
            if len(request.parts) == request.params.n:
                request.answer(request.parts)

    def _called(
        self, batch: Sequence[tuple[Request, int]], params: SamplingParams
    ) -> list[Completion]:
        prompts: list[Any] = [list(request.prompt) for request, _ in batch]
        given = prompts
        if self._texts:
            given = self._tokenizer("to call it with texts").batch_decode(prompts)
        seeds = [number for request, j in batch for number in (request.params.seed or 0, j)]
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(derive_seed(*seeds))
            found = self.inner.generate(given, params)
        if isinstance(found, Mapping):  # of columns
            found = [
                dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)
            ]
        name, found = type(self.inner).__name__, list(found)
        require(
            len(found) == len(batch),
            f"{name}.generate",
            f"must return one response for each of {len(batch)} prompts",
            len(found),
            "return them in the prompts' order; sampling_params.n is 1",
        )
        made = [self._completion(one, params) for one in found]
        bare = [i for i, one in enumerate(made) if one.token_ids and isnan(one.logprobs[0])]
        for i, logprobs in zip(bare, self._logprobs(prompts, made, bare, params), strict=True):
            made[i] = replace(made[i], logprobs=logprobs)
        return made

    def _completion(self, found: Any, params: SamplingParams) -> Completion:
        """Its logprobs are NaN where it has none."""
        version = self.policy_version or 0
        name = type(self.inner).__name__
        if isinstance(found, Completion):
            found = {part: getattr(found, part) for part in ANSWER}
        parts = {"text": found} if isinstance(found, str) else found
        known = isinstance(parts, Mapping) and set(parts) <= set(ANSWER)
        require(
            known and not {"token_ids", "text"}.isdisjoint(parts),
            f"{name}.generate",
            f"must return texts, Completions or dicts of {', '.join(ANSWER)}",
            found,
            "a dict needs token_ids or text",
        )
        ids, text = parts.get("token_ids"), parts.get("text")
        if ids is None:
            encode = self._tokenizer("to train on texts")
            ids = encode(text, add_special_tokens=False)["input_ids"]
        ids = tuple(int(token) for token in ids)
        if text is None:
            decoder = self.tokenizer
            text = "" if decoder is None else decoder.decode(ids, skip_special_tokens=True)
        logprobs = parts.get("logprobs")
        if logprobs is not None:
            fits = f"must return a logprob for each of {len(ids)} tokens"
            remedy = "return None where there is none"
            require(len(logprobs) == len(ids), f"{name}.generate", fits, len(logprobs), remedy)
        reason: Any = parts.get("finish_reason")
        if reason is None:
            reason = "length" if len(ids) >= params.max_new_tokens else "stop"
        ends = ("stop", "length")
        require(
            reason in ends, f"{name}'s finish_reason", f"must be one of {ends}", reason, "omit it"
        )
        asked = not {*ids[-1:]}.isdisjoint(params.stop_token_ids)
        asked = asked or any(stop in text for stop in params.stop_strings)
        require(
            reason == "length" or asked or not params.ignore_eos,
            f"a response of {name}.generate",
            f"must have {params.max_new_tokens} tokens where generation.ignore_eos is true",
            len(ids),
            "obey sampling_params.ignore_eos there, or remove the setting",
        )
        return Completion(
            token_ids=ids,
            logprobs=(nan,) * len(ids) if logprobs is None else tuple(map(float, logprobs)),
            finish_reason=reason,
            text=text_before(params.stop_strings, text),
            policy_versions=(version,) * len(ids),
            tokenizer=self.tokenizer,
        )

    def _tokenizer(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{type(self.inner).__name__} needs a tokenizer {purpose}: give the backend one, or"
                " take and return token ids"
            )
        return self.tokenizer

    def _logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        made: Sequence[Completion],
        bare: Sequence[int],
        params: SamplingParams,
    ) -> Iterator[tuple[float, ...]]:
        """Yield the model's logprobs of the `bare` responses."""
        if bare and not isinstance(self.model, nn.Module):
            raise ValueError(
                f"{type(self.inner).__name__}.generate must return logprobs, because there is no"
                " model here to compute them with: return dicts with token_ids and logprobs, or"
                " remove shares_model=False from its traits"
            )
        filters = {name: getattr(params, name) for name in FILTERS_OFF}
        if params.temperature == 0:
            filters = FILTERS_OFF
        for i in bare:
            response = made[i].token_ids
            ids = torch.tensor([[*prompts[i], *response]], device=self.model.device)
            with evaluating(self.model, self.precision):
                logits = self.model(ids, use_cache=False).logits[0, -len(response) - 1 : -1]
            values = filter_logits(logits.float(), **filters).log_softmax(-1)
            yield tuple(values.gather(-1, ids[0, -len(response) :, None])[:, 0].tolist())


def _batch_params(request: Request) -> SamplingParams:
    return replace(request.params, n=1, seed=None)


@contextmanager
def evaluating(model: nn.Module, precision: str) -> Iterator[None]:
    """Compute without gradients and dropout, in a precision."""
    training, device = model.training, next(model.parameters()).device.type
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, precision != "float32"):
            yield
    finally:
        model.train(training)


def _has(target: Any, name: str) -> bool:
    """Not those of the Protocol that it derives from."""
    cls = target if isinstance(target, type) else type(target)
    method = getattr(target, name, None)
    return callable(method) and getattr(cls, name, None) is not getattr(GenerationBackend, name)


def _accepted(function: Any, offered: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a class of C code
        return {}
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def _nothing(*_: Any) -> None: ...


def _generate(self: Any, prompts: Any, sampling_params: Any) -> list[Completion]:
    async def all_of_them() -> list[list[Completion]]:
        work = [self.sample(*request) for request in zip(prompts, params, strict=True)]
        return await asyncio.gather(*work)

    params = [sampling_params] * len(prompts)
    if not isinstance(sampling_params, SamplingParams):
        params = list(sampling_params)
    return [completion for answer in blocking(all_of_them()) for completion in answer]


_OPTIONAL: dict[str, Any] = {
    "generate": _generate,
    "sleep": _nothing,
    "wake": _nothing,
    "metrics": lambda self: {},
}
