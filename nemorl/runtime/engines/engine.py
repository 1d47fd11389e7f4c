"""One vLLM engine in this process: requests in, samples out, token by token; it knows nothing of
Ray. Everything of vLLM's that we use is here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import random
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemorl.checks import closest
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.runtime.engines.spec import EngineSpec, Finished, Request, Sample, vocabulary_hash

REPORT_TOKENS = 16
"""An engine tells of a sample's tokens at the first one and every so many: often enough to see
progress, too seldom to cost time.
"""
CPU_DEFAULTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": 32,
    "enable_chunked_prefill": False,
}
"""Where there is no GPU: nothing is compiled, the cache has 1 GiB, and its blocks are small, so
that the samples of short prompts share them, too.

A prompt is computed at once: of one in parts, vLLM could not set the seeded generator back that it
draws from after every part.
"""


QUIET = {
    "vllm.triton_utils.importing": logging.ERROR,
    "vllm.model_executor.model_loader.reload.layerwise": (
        logging.ERROR
    ),  # warns in every update of layers that have nothing to load
    "vllm.v1.core.block_pool": logging.WARNING,
}
"""What would be said in every start or every update, and worries for nothing."""


class EngineStartError(ValueError):
    """An engine that can't start; the message begins with its own reason."""


@dataclass
class _Tokens:
    """A sample on its way."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A vLLM engine, made from an `EngineSpec`. It has no weights worth generating with until
    `finish_weights`.

    Not for more than one thread. Raises EngineStartError.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.usable, self.num_tokens = False, 0
        self._samples: dict[int, list[_Tokens]] = {}
        first = not torch.distributed.is_initialized()
        try:
            with tempfile.TemporaryDirectory(prefix="nemorl-engine-") as folder, _process_kept():
                for name, content in spec.files.items():
                    (Path(folder) / name).write_bytes(content)
                self._start(spec, folder)
        except Exception as error:
            if first and torch.distributed.is_initialized():
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(
                f"{_reason(error)} (so the vLLM engine could not start)"
            ) from error

    def _start(self, spec: EngineSpec, folder: str) -> None:
        for name, level in QUIET.items():
            logging.getLogger(name).setLevel(level)
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.platforms import current_platform
        except ImportError as error:
            raise EngineStartError(
                f'vLLM can\'t be imported ({error}): pip install "nemorl[vllm]", or use'
                " generation.backend torch"
            ) from error
        known = {item.name for item in dataclasses.fields(EngineArgs)}
        for name in spec.engine:
            if name not in known:
                raise EngineStartError(
                    f"unknown argument {name!r} in generation.engine{closest(name, known)}: use"
                    " vLLM's own names, with _"
                )
        self._cpu = current_platform.is_cpu()
        if self._cpu and spec.engine.get("enable_chunked_prefill"):
            raise EngineStartError(
                "generation.engine's enable_chunked_prefill must be off where there is no GPU:"
                " leave it out"
            )
        if self._cpu and spec.sleep_level:
            raise EngineStartError(
                "generation.sleep_level must be 0 where there is no GPU, but it is"
                f" {spec.sleep_level}: leave it out"
            )
        args = EngineArgs(
            **{
                **(CPU_DEFAULTS if self._cpu else {}),
                **self._arguments(spec, folder),
                **spec.engine,
            }
        )
        self._eager = self._cpu and args.enforce_eager
        if self._eager and spec.tensor_parallel_size > 1:
            os.environ["TORCH_COMPILE_DISABLE"] = (
                "1"  # for the engine's own processes; in this one see _computing
            )
        self._sleep_level = spec.sleep_level
        self._llm = LLMEngine.from_engine_args(args)
        try:
            found = None if self._llm.tokenizer is None else vocabulary_hash(self._llm.tokenizer)
            if found != spec.vocabulary:
                raise EngineStartError(
                    "the engine's tokenizer must have the trainer's tokens, but it numbers them"
                    " otherwise: give both the same one"
                )
            self._try()
        except BaseException:
            self.shutdown()
            raise

    def _arguments(self, spec: EngineSpec, folder: str) -> dict[str, Any]:
        chosen: dict[str, Any] = (
            {}
            if spec.weight_transport is None
            else {"weight_transfer_config": {"backend": spec.weight_transport}}
        )
        if spec.tensor_parallel_size > 1:
            chosen[
                "distributed_executor_backend"
            ] = (  # in a process of Ray's, vLLM would ask Ray for places that are its own already
                "mp"
            )
        return chosen | {
            "model": folder,
            "skip_tokenizer_init": spec.vocabulary is None,
            "dtype": spec.dtype,
            "max_num_seqs": spec.max_num_seqs,
            "max_model_len": spec.max_model_len,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "load_format": "dummy",
            "worker_extension_cls": "nemorl.runtime.engines.weights.WeightExtension",
            "enable_sleep_mode": spec.sleep_level > 0,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "seed": 0,
        }

    def _try(self) -> None:
        """Generate a token: some models that an engine takes it only fails to compute (on CPU,
        those with attention heads of an odd size).
        """
        self.add(
            [
                Request(
                    id=-1,
                    prompt=(0,),
                    params=SamplingParams(temperature=0.0, max_new_tokens=1, seed=0),
                )
            ]
        )
        while self._samples:
            self.step()
        self.num_tokens = 0

    def add(self, requests: Sequence[Request]) -> None:
        """Have the requests generated, in this order as places get free."""
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            p = request.params
            assert p.seed is not None
            self._samples[request.id] = [_Tokens() for _ in range(p.n)]
            # One engine request per sample: vLLM's own n samples would have the seeds of their
            # neighbours, and may not be greedy.
            for j in range(p.n):
                params = EngineParams(
                    temperature=p.temperature,
                    top_k=p.top_k,
                    top_p=p.top_p,
                    min_p=p.min_p,
                    max_tokens=p.max_new_tokens,
                    stop=list(p.stop_strings),
                    stop_token_ids=list(p.stop_token_ids),
                    ignore_eos=True,
                    detokenize=bool(p.stop_strings),
                    seed=derive_seed(p.seed, j),
                    logprobs=0,
                    flat_logprobs=True,
                    output_kind=RequestOutputKind.DELTA,
                    stream_interval=REPORT_TOKENS,
                    skip_clone=True,
                )
                self._llm.add_request(
                    f"{request.id}/{j}",
                    {"type": "token", "prompt_token_ids": list(request.prompt)},
                    params,
                )

    def step(self) -> list[Finished]:
        """Compute the next tokens; the requests that this finished. Nothing to do: an empty list.

        Raises FloatingPointError where the logits are not finite, and has nothing more to do then.
        """
        if not self._samples:
            return []
        with self._computing():
            outputs = self._llm.step()
        finished: list[Finished] = []
        for output in outputs:
            name, _, j = output.request_id.partition("/")
            (part,) = output.outputs
            sample = self._samples[int(name)][int(j)]
            sample.token_ids += part.token_ids
            sample.logprobs += part.logprobs.logprobs
            sample.finish_reason = part.finish_reason
            self.num_tokens += len(part.token_ids)
            if not math.isfinite(part.cumulative_logprob):
                self.give_up()
                self._llm.collective_rpc(_clear_cache)
                raise FloatingPointError(
                    "the model's logits are not finite, so that no token can be sampled: its"
                    " weights hold NaN or infinity"
                )
            if part.finish_reason and all(
                other.finish_reason for other in self._samples[int(name)]
            ):
                finished.append(_finished(int(name), self._samples.pop(int(name))))
        return finished

    @contextmanager
    def _computing(self) -> Iterator[None]:
        if not self._cpu:
            yield
            return
        # There it draws from the process's generator, although every request has one, and would
        # compile a function in the first step.
        with (
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager") if self._eager else nullcontext(),
        ):
            yield

    def abort(self, ids: Iterable[int]) -> None:
        """Drop these requests, whatever they have."""
        for request in ids:
            samples = self._samples.pop(request, [])
            self._llm.abort_request([f"{request}/{j}" for j in range(len(samples))])

    def give_up(self) -> None:
        """Drop everything after a step that did not come to its end: the cache, too, which counts
        as computed what such a step was to compute.
        """
        self.abort(list(self._samples))
        self.usable = self._llm.reset_prefix_cache() and self.usable

    def recall(self, ids: Iterable[int]) -> list[int]:
        """Drop those of these requests that have no token yet, and say which."""
        recalled = [
            request
            for request in ids
            if request in self._samples and not any(s.token_ids for s in self._samples[request])
        ]
        self.abort(recalled)
        return recalled

    @property
    def unfinished(self) -> int:
        """Requests that are not finished."""
        return len(self._samples)

    def begin_weights(self) -> None:
        """New weights follow. Until `finish_weights` there is nothing to generate with."""
        self.abort(list(self._samples))
        self.usable = False
        self._llm.collective_rpc("nemorl_begin")

    def load_weights(self, payload: Any) -> None:
        split = self._llm.vllm_config.parallel_config.world_size > 1
        self._llm.collective_rpc("nemorl_load", args=(payload.nearby() if split else payload,))

    def finish_weights(self) -> None:
        """All weights are there. What was cached of prompts belongs to the old ones."""
        self._llm.collective_rpc("nemorl_finish")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "the engine's cache must be empty before new weights are used, but vLLM holds on to"
                " a part of it: start it anew"
            )
        self.usable = True

    def sleep(self) -> None:
        """Give memory back, as the sleep level says: at level 2 the weights, too, so that new ones
        must follow.
        """
        if self._sleep_level:
            self._llm.sleep(self._sleep_level)
            self.usable = self.usable and self._sleep_level < 2

    def wake(self) -> None:
        if self._sleep_level:
            self._llm.wake_up()

    def shutdown(self) -> None:
        """End it, its processes, and the process group that it began in this one."""
        self._llm.engine_core.shutdown()


def _finished(request: int, samples: list[_Tokens]) -> Finished:
    made = []
    for s in samples:
        if s.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"the engine ended a response with {s.finish_reason!r}, which is neither a stop nor"
                " its length: see its log"
            )
        made.append(
            Sample(
                token_ids=tuple(s.token_ids),
                logprobs=tuple(s.logprobs),
                finish_reason=s.finish_reason,
            )
        )  # type: ignore[arg-type]
    return Finished(id=request, samples=tuple(made))


def _clear_cache(worker: Any) -> None:
    """What is not finite spoils also what only stands beside it in a block of the cache."""
    for cache in worker.model_runner.kv_caches:
        for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
            tensor.zero_()


@contextmanager
def _process_kept() -> Iterator[None]:
    """An engine's start changes much of its process, which may be the trainer's: afterwards it is
    as it was.
    """
    before, set_num_threads, threads = (
        dict(os.environ),
        torch.set_num_threads,
        torch.get_num_threads(),
    )
    python, numbers = random.getstate(), np.random.get_state()
    os.environ.update(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": before.get("VLLM_LOGGING_LEVEL", "CRITICAL"),
        }
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads = (
            set_num_threads  # on CPU it is replaced by a function that does nothing
        )
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numbers)


def _reason(error: BaseException) -> str:
    """What vLLM says is wrong, without what its checker of arguments puts around it."""
    text, errors = str(error).strip() or repr(error), getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        text = "; ".join(
            ": ".join([*map(str, item["loc"]), item["msg"].removeprefix("Value error, ")])
            for item in errors()
        )
    elif "root cause" in text and (cause := _last_error(Path("/proc/self/fd/1"))):
        text = cause
    if "Unsupported CPU attention configuration" in text:
        text += (
            ": vLLM on CPUs needs heads of 32, 64, 80, 96, 112, 128, 192 or 256 entries; use"
            " generation.backend torch"
        )
    return (
        text if len(text) < 500 else f"{text[:500]} …"
    )  # some list all the names that would have been right


def _last_error(output: Path) -> str:
    """What an engine's own process has said last of why it ended, where it could: in a replica's
    log, which is the output of all its processes.
    """
    if not output.is_file():
        return ""
    said = re.findall(
        r"^.*\] ((?:\w+\.)*\w+(?:Error|Exception): .*)$",
        output.read_text(encoding="utf-8", errors="replace"),
        re.MULTILINE,
    )
    return said[-1] if said else ""
