"""The generation backend "vllm": an engine in the trainer's process, or replicas in processes of their own, behind `GenerationBackend`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nemorl.checks import require
from nemorl.models.adapters import merged_tensors
from nemorl.models.causal_lm import end_tokens
from nemorl.rollout.generation import Completion, SamplingParams, checked_requests, text_before
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.engine import Engine
from nemorl.runtime.engines.spec import EngineSpec, Request, Sample, engine_spec
from nemorl.runtime.engines.weight_buckets import expected_weights
from nemorl.runtime.engines.weight_transport import LocalReceiver, WeightSender


@runtime_checkable
class Engines(Protocol):
    """What generates for the backend: `LocalEngine`, or `Replicas`."""

    def generate(self, requests: Sequence[Request]) -> Mapping[int, tuple[Sample, ...]]:
        """The samples of each request, by its id.

        Whatever goes wrong, nothing goes on in the background.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All engines have the weights afterwards, or this raises and nothing can be generated
        until an update succeeds.
        """

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Since this was last asked."""

    def shutdown(self) -> None: ...


class LocalEngine:
    """One engine in this process."""

    def __init__(self, spec: EngineSpec, expected: Mapping[str, tuple[int, ...]]) -> None:
        with _stderr_aside():
            self.engine = Engine(spec)
        self._sender = WeightSender(expected, dtype=getattr(torch, spec.dtype), transport="direct")
        self._source: tuple[Iterable[tuple[str, Tensor]], int] = (), 0
        self._tokens, self._seconds = 0, 0.0

    def generate(self, requests: Sequence[Request]) -> Mapping[int, tuple[Sample, ...]]:
        if not self.engine.usable:
            self.update_weights(*self._source)  # it lost them while it slept
        start, tokens, samples = time.perf_counter(), self.engine.num_tokens, {}
        try:
            self.engine.add(requests)
            while self.engine.unfinished:
                samples.update({finished.id: finished.samples for finished in self.engine.step()})
        except BaseException:
            self.engine.give_up()
            raise
        self._tokens += self.engine.num_tokens - tokens
        self._seconds += time.perf_counter() - start
        return samples

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._source = weights, version
        for error in self._sender.send(weights, [LocalReceiver(self.engine)]).values():
            raise error

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def metrics(self) -> dict[str, float]:
        measured = {"tokens_per_second": self._tokens / self._seconds} if self._seconds else {}
        self._tokens, self._seconds = 0, 0.0
        return measured

    def shutdown(self) -> None:
        self._sender.close()
        self.engine.shutdown()


class VLLMGenerationBackend:
    """`GenerationBackend` "vllm". It has a copy of the trainer's weights, which follows by `update_weights`; the first one it takes by itself."""

    shares_model = False

    def __init__(self, *, model: Any, tokenizer: Any = None, precision: str = "float32") -> None:
        self.model, self.tokenizer, self.precision = model, tokenizer, precision
        self.policy_version: int | None = None
        """None: there are no weights yet, or an update of them failed."""
        self.updated = self.asleep = False
        self._engines: Engines | None = None

    def setup(self, config: GenerationConfig) -> None:
        """Start the engines.

        Raises ValueError where they can't start, or can't do what `config` asks for.
        """
        if self._engines is not None:
            raise RuntimeError("the generation backend has its engines already: call setup() once")
        check_sampling(config.sampling_params())
        local = config.num_replicas == 0
        require(not local or config.tensor_parallel_size == 1, "generation.tensor_parallel_size", "needs engines in processes of their own",
                config.tensor_parallel_size, "add --generation.num-replicas 1")  # fmt: skip
        self._ends = end_tokens(self.model, self.tokenizer)
        spec = engine_spec(self.model, self.tokenizer, config, precision=self.precision)
        self._positions = spec.max_model_len or sys.maxsize
        if local:
            self._engines = LocalEngine(spec, expected_weights(self.model.config))
        else:
            try:
                from nemorl.runtime.engines.replicas import Replicas
            except ImportError as error:
                missing = f"needs Ray, which can't be imported ({error})"
                raise ValueError(
                    f"generation.num_replicas {missing}: pip install 'nemorl[ray]', or leave it out"
                ) from error
            self._engines = Replicas(config, spec)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        engines = self._running
        if self.asleep:
            raise RuntimeError("the generation backend sleeps: call wake() before generate()")
        requests = self._requests(prompts, sampling_params)
        if self.policy_version is None and self.updated:
            raise RuntimeError(
                "the generation backend's weights are incomplete, because an update failed: call"
                " update_weights() with all of them"
            )
        if self.policy_version is None and requests:
            self.update_weights(_Live(self.model), 0)
        samples = engines.generate(requests) if requests else {}
        made = [(request, sample) for request in requests for sample in samples[request.id]]
        texts = [""] * len(made)
        if self.tokenizer is not None and made:
            texts = self.tokenizer.batch_decode(
                [sample.token_ids for _, sample in made], skip_special_tokens=True
            )
        return [
            Completion(
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                text=text_before(request.params.stop_strings, text),
                policy_version=self.policy_version or 0,
            )
            for (request, sample), text in zip(made, texts, strict=True)
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Raises ValueError for weights that are not the model's.

        After an update that failed nothing is generated until one succeeds.
        """
        self.policy_version, self.updated = None, True
        self._running.update_weights(weights, version)
        self.policy_version = version

    def sleep(self) -> None:
        if not self.asleep:
            self._running.sleep()
        self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self._running.wake()
        self.asleep = False

    def metrics(self) -> dict[str, float]:
        return self._running.metrics()

    def shutdown(self) -> None:
        if self._engines is not None:
            self._engines.shutdown()
        self._engines = self.model = None

    @property
    def _running(self) -> Engines:
        if self._engines is None:
            raise RuntimeError(
                "the generation backend has no engine: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._engines

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Request]:
        params = checked_requests(
            prompts,
            sampling_params,
            vocab_size=self.model.config.vocab_size,
            max_positions=self._positions,
        )
        requests = []
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            check_sampling(p)
            if p.stop_strings and self.tokenizer is None:
                raise ValueError(
                    "stop_strings need a tokenizer: give the backend one, or use stop_token_ids"
                )
            complete = replace(
                p,
                seed=int(torch.randint(2**62, ())) if p.seed is None else p.seed,
                stop_token_ids=(*p.stop_token_ids, *self._ends),
                max_new_tokens=min(p.max_new_tokens, self._positions - len(prompt)),
            )
            requests.append(Request(id=index, prompt=tuple(prompt), params=complete))
        return requests


@contextmanager
def _stderr_aside() -> Iterator[None]:
    """What libraries write to the standard error of this process, past Python, is not for its
    user's screen; errors come as exceptions.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


class _Live:
    """The weights that a model has at the moment, as often as they are asked for until they change:
    those of one version are the same everywhere.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.changes = model, _changes(model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if _changes(self.model) != self.changes:
            raise RuntimeError(
                "the model has changed since its weights were taken, so an engine can't get the"
                " same again: call update_weights()"
            )
        return merged_tensors(self.model)


def _changes(model: Any) -> int:
    """How often the parameters have been changed in place."""
    return sum(parameter._version for parameter in model.parameters())


def check_sampling(params: SamplingParams) -> None:
    """Raise a ValueError for what vLLM does not do, or would do otherwise without a word.

    >>> check_sampling(SamplingParams(temperature=0.001))
    Traceback (most recent call last):
    ValueError: temperature must be 0 (greedy) or within 0.01 … 2 for vLLM, but it is 0.001: use 0, or generation.backend torch
    """
    require(params.temperature == 0 or 0.01 <= params.temperature <= 2, "temperature", "must be 0 (greedy) or within 0.01 … 2 for vLLM",
            params.temperature, "use 0, or generation.backend torch")  # fmt: skip
