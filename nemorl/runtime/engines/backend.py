"""The generation backend "vllm": engines in Ray actors, behind `GenerationBackend`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nemorl.checks import require
from nemorl.losses.logprobs import LogprobKind
from nemorl.models.capabilities import Proof
from nemorl.models.causal_lm import end_tokens
from nemorl.models.source import ModelSource
from nemorl.models.tiny import SIZES, tiny_config, tiny_model
from nemorl.rollout.calls import blocking
from nemorl.rollout.config import TRAITS, GenerationConfig
from nemorl.rollout.generation import (
    Completion,
    InFlight,
    SamplingParams,
    Scores,
    Weights,
    WeightSource,
    check_in_flight,
    check_ready,
    check_scored,
    checked_requests,
    seeded,
    text_before,
)
from nemorl.runtime.engines.spec import (
    Scored,
    Scoring,
    check_arguments,
    check_machine,
    engine_spec,
)
from nemorl.runtime.engines.weights import Place, Transport, current_device, started

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemorl.runtime.engines.replicas import Replicas, Request
    from nemorl.runtime.engines.spec import Sample


class VLLMGenerationBackend:
    """Engines with the weights of `model` until the first `update_weights`."""

    traits, check = TRAITS["vllm"], staticmethod(check_machine)
    sleeps = True

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any = None,
        precision: str = "float32",
        records_experts: bool = False,
        beside: Sequence[Place] = (),
    ) -> None:
        """records_experts: completions have the `routed_experts` of each token, if there are any.
        beside: ranks whose GPUs the engines share, as Ray has given them to the ranks.
        """
        self.model: ModelSource | None = ModelSource.of(model)
        self.tokenizer, self.precision, self._records = tokenizer, precision, records_experts
        self._beside = beside
        self.policy_version: int | None = None
        self.updated = self.asleep = self._failed = False
        self._lock = threading.RLock()
        self._engines: Replicas | None = None

    def setup(self, config: GenerationConfig) -> None:
        """Start the engines. Raises ValueError where they can't, or can't do what is asked for."""
        if self._engines is not None:
            raise RuntimeError("the generation backend has its engines already: call setup() once")
        check_sampling(config.sampling_params())
        check_arguments(config.engine)
        model = self._source
        self._ends = end_tokens(model, self.tokenizer)
        try:
            from nemorl.runtime.engines.replicas import Replicas
            from nemorl.runtime.workers.cluster import connect, has_gpus, release
        except ImportError as error:
            raise ValueError(
                "generation.backend vllm needs Ray, which can't be imported"
                f" ({error}): pip install 'nemorl[ray]', or use generation.backend torch"
            ) from error
        connect(timeout_s=config.start_timeout_s, setting="generation.start_timeout_s")
        try:
            spec = engine_spec(
                model,
                self.tokenizer,
                config,
                precision=self.precision,
                on_gpus=bool(self._beside) or has_gpus(),
                records_experts=self._records,
            )
            self._positions = spec.max_model_len or sys.maxsize
            self.sleeps = config.colocated or spec.sleep_level > 0
            self._engines = Replicas(config, spec, self._beside)
        finally:
            release()

    @property
    def transport(self) -> Transport | None:
        return None if self._engines is None else self._engines.supply.transport

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        requests = self._requests([prompt], params)
        return self._completions(requests, await self._running.answers(requests))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        requests = self._requests(prompts, sampling_params)
        return self._completions(requests, self._running.generate(requests) if requests else [])

    def _completions(
        self, requests: Sequence[Request], groups: Sequence[tuple[Sample, ...]]
    ) -> list[Completion]:
        made = [
            (params, sample)
            for (_, params), samples in zip(requests, groups, strict=True)
            for sample in samples
        ]
        texts = [""] * len(made)
        if self.tokenizer is not None and made:
            ids = [sample.token_ids for _, sample in made]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            Completion(
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                text=text_before(params.stop_strings, text),
                policy_versions=sample.policy_versions,
                # A copy: Ray's arrays are read-only, and keep all of their answer in memory.
                routed_experts=None if (e := sample.routed_experts) is None else torch.tensor(e),
                tokenizer=self.tokenizer,
            )
            for (params, sample), text in zip(made, texts, strict=True)
        ]

    async def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        top_k: int = 0,
        kind: LogprobKind | None = None,
    ) -> Scores:
        """Score on all engines; what older weights than the last ones scored is scored again."""
        self._check()
        vocab, positions = self._source.config.vocab_size, self._positions
        check_scored(token_ids, top_k, vocab_size=vocab, max_positions=positions)
        scoring = Scoring(top_k=top_k, kind=kind or LogprobKind())
        found, version = dict[int, Scored](), self.policy_version
        left: Sequence[int] = range(len(token_ids))
        for _ in range(4):
            asked = [(tuple(map(int, token_ids[i])), scoring) for i in left]
            answers = await self._running.answers(asked)
            for i, (one,) in zip(left, answers, strict=True):
                found[i], version = one, one.policy_version
            left = [i for i, one in found.items() if one.policy_version != version]
            if not left:
                break
        else:
            raise RuntimeError(
                "the weights changed 4 times while token_ids were scored: score fewer at once"
            )
        # Copies: Ray's arrays are read-only. A single token was its own target.
        each = [
            (one.token_ids[: len(ids)], one.logprobs[: len(ids)])
            for ids, one in zip(token_ids, found.values(), strict=True)
        ]
        return Scores(
            token_logprobs=tuple(logprobs[:, 0].copy() for _, logprobs in each),
            top_ids=tuple(ids[:, 1:].copy() for ids, _ in each if top_k),
            top_logprobs=tuple(logprobs[:, 1:].copy() for _, logprobs in each if top_k),
            policy_version=version,
        )

    async def update_weights(self, source: WeightSource, *, in_flight: InFlight = "keep") -> int:
        """Send the newest weights on a thread, and compare checksums of what arrives.

        Raises ValueError for weights that are not the model's, and WeightsDiffer where an engine
        got others than it was sent; then nothing is generated until an update succeeds.
        """
        check_in_flight(in_flight)
        update = partial(self._update, source, in_flight)
        return await asyncio.wrap_future(started(update, current_device()))

    def _update(self, source: WeightSource, in_flight: InFlight = "keep") -> int:
        with self._lock:
            if self.asleep:
                raise RuntimeError(
                    "the generation backend sleeps: call wake() before update_weights()"
                )
            self.policy_version, self.updated, self._failed = None, True, False
            try:
                self.policy_version = self._running.supply.update(source, in_flight)
            except BaseException:
                self._failed = True
                raise
            return self.policy_version

    def sleep(self) -> None:
        if self.sleeps and not self.asleep:
            self._running.sleep()
        self.asleep = self.sleeps

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
    def _source(self) -> ModelSource:
        if self.model is None:
            raise RuntimeError("the generation backend was shut down: make a new one")
        return self.model

    @property
    def _running(self) -> Replicas:
        if self._engines is None:
            raise RuntimeError(
                "the generation backend has no engine: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._engines

    def _check(self) -> None:
        _ = self._running
        check_ready(asleep=self.asleep, failed=self._failed)
        if self.updated:  # without the lock: an update must not hold up new requests
            return
        with self._lock:
            if not self.updated:
                self._update(Weights(version=0, tensors=self._source))

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Request]:
        self._check()
        params = checked_requests(
            prompts,
            sampling_params,
            vocab_size=self._source.config.vocab_size,
            max_positions=self._positions,
        )
        requests = []
        for prompt, p in zip(prompts, params, strict=True):
            check_sampling(p)
            complete = replace(
                seeded(p, self.tokenizer),
                stop_token_ids=(*p.stop_token_ids, *(() if p.ignore_eos else self._ends)),
                max_new_tokens=min(p.max_new_tokens, self._positions - len(prompt)),
            )
            requests.append((tuple(prompt), complete))
        return requests


def check_sampling(params: SamplingParams) -> None:
    """Raise a ValueError for what vLLM does not do, or silently does otherwise.

    >>> check_sampling(SamplingParams(temperature=0.001))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: temperature must be 0 (greedy) or within 0.01 … 2 for vLLM, but it is 0.001: use ...
    """
    require(
        params.temperature == 0 or 0.01 <= params.temperature <= 2,
        "temperature",
        "must be 0 (greedy) or within 0.01 … 2 for vLLM",
        params.temperature,
        "use 0, or generation.backend torch",
    )


ENGINE_SIZES = {
    **SIZES,
    **{"hidden_size": 128, "head_dim": 32, "attention_chunk_size": 32},
    **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128},
}
"""Sizes of a tiny model that vLLM's kernels for CPUs take."""


def prove_engine(config: PretrainedConfig) -> Proof:
    """Start vLLM with a tiny model of a configuration, in about a minute, and compare its logprobs
    with those of transformers' plain code: with the first weights, and with others after an update.
    """
    from nemorl.parallel.proving import proof_of

    return proof_of(lambda: _sampled(tiny_config(config, ENGINE_SIZES)))


def _sampled(config: PretrainedConfig) -> float:
    from nemorl.models.adapters import merged_tensors
    from nemorl.parallel.proving import sampled_differ, samples

    rows = samples(config.vocab_size)
    first, second = tiny_model(config), tiny_model(config, seed=1)
    backend = VLLMGenerationBackend(model=first)
    with tempfile.TemporaryDirectory() as logs:
        settings = GenerationConfig(
            backend="vllm",
            engine={"kv_cache_memory_bytes": 2**25},
            max_restarts=0,
            max_batch_size=4,
            max_model_len=128,
            log_dir=logs,
        )
        try:
            backend.setup(settings)
            worst = sampled_differ(backend, first, rows)
            blocking(backend.update_weights(Weights(version=1, tensors=merged_tensors(second))))
            return max(worst, sampled_differ(backend, second, rows))
        finally:
            backend.shutdown()
