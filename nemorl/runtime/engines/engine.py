"""One vLLM engine, requests in and samples out, and the Ray actor in whose thread it is."""

import asyncio
import dataclasses
import itertools
import json
import logging
import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from nemorl.checks import closest, require
from nemorl.models.adapters import write_adapters
from nemorl.models.tensor_files import tensor_checksum
from nemorl.openmp import spinning_variables
from nemorl.rollout.config import VLLM_RANKS
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.random import derive_seed
from nemorl.runtime.engines.spec import (
    Answer,
    EngineSpec,
    Sample,
    Scored,
    Scoring,
    vocabulary_hash,
)
from nemorl.runtime.engines.weights import Bucket, Place, unpacked
from nemorl.runtime.store.files import temporary_folder
from nemorl.runtime.workers.worker import begin_worker, free_port

CPU_DEFAULTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": 32,
    "enable_chunked_prefill": False,
}
"""Without a GPU. Short prompts share small blocks, too; a prompt is one chunk, as vLLM's seeded
generator draws after each.
"""
QUIET = {
    "vllm.triton_utils.importing": logging.ERROR,
    "vllm.model_executor.model_loader.reload.layerwise": logging.ERROR,
    "vllm.v1.core.block_pool": logging.WARNING,
}
"""Loggers with harmless messages at every start or update."""
TMPDIR = tempfile.gettempdir()


def environment(cpus: int, *, eager: bool, cuda: bool) -> dict[str, str]:
    """Return environment variables of an engine's process."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "OMP_NUM_THREADS": str(cpus),
        **spinning_variables(),
    }
    if not cuda:
        # An update frees memory layer by layer, which takes long in pages of 4 KiB.
        variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        if eager:  # or a function is compiled in the first step
            variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


class EngineStartError(ValueError):
    """An engine can't start; the message begins with its reason."""


@dataclass
class _Tokens:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    name: str = ""
    sample: Sample | Scored | None = None


class VLLMEngine:
    """A vLLM engine for one thread, usable once it has weights. Raises EngineStartError."""

    def __init__(self, spec: EngineSpec) -> None:
        self.usable = self.asleep = self._updating = False
        self.partial = 0
        self._expert_layers: list[int] | None = None
        """With experts, which vLLM records itself."""
        self._adapters: Any = None
        self._requests: dict[int, list[_Tokens]] = {}
        with ExitStack() as self._folder:
            self._folder.enter_context(own_folder())
            with starting(spec) as (arguments, cpu):
                self._start(spec, arguments, cpu=cpu)
            self._folder = self._folder.pop_all()

    def _start(self, spec: EngineSpec, arguments: Any, *, cpu: bool) -> None:
        from vllm import LLMEngine

        self._sleep_level = spec.sleep_level
        self._records = spec.records_experts
        self._llm = LLMEngine.from_engine_args(arguments)
        try:
            if self._records and cpu:
                self._llm.collective_rpc("nemorl_record_experts")
            elif self._records:
                self._expert_layers = self._llm.collective_rpc("nemorl_expert_layers")[0]
            self._llm.collective_rpc("nemorl_score_tokens")
            if cpu and spec.pipeline_parallel_size > 1:
                self._llm.collective_rpc("nemorl_take_stage")
            if _is_split(spec):
                self._llm.collective_rpc(_unlink_memory)
                _unlink_memory()
            self.uuids = tuple(filter(None, self._llm.collective_rpc("nemorl_uuid")))
            found = None if self._llm.tokenizer is None else vocabulary_hash(self._llm.tokenizer)
            if found != spec.vocabulary:
                raise ValueError(
                    "the engine's tokenizer must have the trainer's tokens, but it numbers them"
                    " otherwise: give both the same one"
                )
            self._llm.set_weight_version("0")
            # Some models start that can't be computed.
            self.add(-1, (0,), SamplingParams(temperature=0.0, max_new_tokens=1, seed=0))
            while self._requests:
                self.step()
        except BaseException:
            self.shutdown()
            raise

    @property
    def busy(self) -> bool:
        return self.usable and not self.asleep and bool(self._requests)

    def add(self, id: int, prompt: tuple[int, ...], params: SamplingParams | Scoring) -> None:
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        common: Any = {
            "ignore_eos": True,
            "output_kind": RequestOutputKind.DELTA,
            "skip_clone": True,
        }
        self._requests[id] = [_Tokens() for _ in range(params.n)]
        if isinstance(params, Scoring):
            # The last token is a target alone: there may be no position for one behind it.
            own = EngineParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                prompt_logprobs=0,
                extra_args={"scoring": params, "targets": torch.tensor(prompt[1:] or prompt)},
                **common,
            )
            name = self._add(f"{id}/0", prompt[:-1] or prompt, own)
            processor: Any = self._llm.output_processor.request_states[name].logprobs_processor
            # Or vLLM makes lists of Python's numbers.
            processor._update_prompt_logprobs = partial(setattr, processor, "prompt_logprobs")
            return
        assert params.seed is not None
        # One engine request per sample: vLLM's own n samples have their neighbors' seeds.
        for j in range(params.n):
            own = EngineParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                max_tokens=params.max_new_tokens,
                stop=list(params.stop_strings),
                stop_token_ids=list(params.stop_token_ids),  # with the end tokens that count
                detokenize=bool(params.stop_strings),
                seed=derive_seed(params.seed, j),
                logprobs=0,
                flat_logprobs=True,
                stream_interval=16,  # tokens from report to report
                **common,
            )
            self._requests[id][j].name = self._add(f"{id}/{j}", prompt, own)

    def _add(self, name: str, prompt: tuple[int, ...], params: Any) -> str:
        tokens = {"type": "token", "prompt_token_ids": list(prompt)}
        return self._llm.add_request(name, tokens, params, lora_request=self._adapters)

    def step(self) -> dict[int, tuple[Any, ...]]:
        """Compute the next tokens; return the answers to prompts that are finished now, by id.

        Raises FloatingPointError where logits are not finite, and drops all requests.
        """
        finished = {}
        for output in self._llm.step():
            id, j = map(int, output.request_id.split("/"))
            request, part = self._requests[id], output.outputs[0]
            scores: Any = output.prompt_logprobs
            if scores is None:
                request[j].token_ids += part.token_ids
                request[j].logprobs += part.logprobs.logprobs
                fine = math.isfinite(part.cumulative_logprob)
            else:
                fine = not scores.logprobs.isnan().any()
            if not fine:
                self.abort_all()
                self._llm.collective_rpc(_clear_cache)
                raise FloatingPointError(
                    "the model's logits are not finite, as its weights hold NaN or infinity:"
                    " load others, or lower optimizer.lr"
                )
            if part.finish_reason:
                request[j].sample = self._sample(request[j], part, scores)
                self.partial += 1
                samples = tuple(one.sample for one in request if one.sample)
                if len(samples) == len(request):
                    finished[id] = samples
                    self.partial -= len(samples)
                    del self._requests[id]
        return finished

    def _sample(self, tokens: _Tokens, part: Any, scores: Any) -> Sample | Scored:
        if part.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                "a response must end with a stop or its length, but it ended with"
                f" {part.finish_reason!r}: see the engine's log"
            )
        if scores is not None:
            ids, logprobs = (np.pad(each.numpy(), ((1, 0), (0, 0))) for each in scores[:2])
            logprobs[0, 1:] = -np.inf
            version = int(part.weight_versions[0].version)
            return Scored(token_ids=ids, logprobs=logprobs, policy_version=version)
        experts = None
        if self._expert_layers is not None:
            experts = part.routed_experts[:, self._expert_layers].astype("int16")
        elif self._records:
            experts = self._llm.collective_rpc("nemorl_take_experts", args=(tokens.name,))[0]
        spans = part.weight_versions or ()
        return Sample(
            token_ids=tuple(tokens.token_ids),
            logprobs=tuple(tokens.logprobs),
            policy_versions=tuple(
                int(span.version) for span in spans for _ in range(span.start, span.end)
            ),
            finish_reason=part.finish_reason,
            routed_experts=experts,
        )

    def abort(self, id: int) -> None:
        samples = self._requests.pop(id, [])
        self.partial -= sum(one.sample is not None for one in samples)
        self._llm.abort_request([f"{id}/{j}" for j in range(len(samples))])

    def abort_all(self) -> None:
        for id in list(self._requests):
            self.abort(id)
        self._llm.reset_prefix_cache()

    def connect(self, info: dict[str, Any]) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", args=(info,))

    def begin_weights(self) -> None:
        """Compute nothing until `finish_weights`."""
        self.usable, self._updating = False, True
        self._llm.collective_rpc("nemorl_start_weight_update")

    def load_weights(self, info: dict[str, Any]) -> None:
        self._llm.collective_rpc("update_weights", args=(info,))

    def finish_weights(
        self, version: int, adapters: Bucket | None = None
    ) -> list[list[tuple[str, int]]]:
        """Use the new weights, also for unfinished samples, whose cache is computed again. Return
        the names and checksums that came, once for all workers that got the same.
        """
        self.usable, workers = False, list[list[tuple[str, int]]]()
        if self._updating:
            self._llm.collective_rpc("finish_weight_update")
            workers = self._llm.collective_rpc("nemorl_checksums")
        self._updating = False
        own = [(name, int(tensor_checksum(tensor))) for name, tensor in unpacked(adapters or [])]
        arrived = [each for i, each in enumerate(workers) if each not in workers[:i]] or [[]]
        self._take_adapters(adapters)
        self._llm.set_weight_version(str(version))
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                "the engine's cache must be empty before new weights are used, but vLLM keeps a"
                " part of it: start it again"
            )
        self.usable = True
        return [each + own for each in arrived]

    def _take_adapters(self, adapters: Bucket | None) -> None:
        if bool(adapters) != bool(self._adapters) and self._requests:
            raise RuntimeError(
                "requests in flight can't begin or end to use adapters: update the weights first"
            )
        if not adapters:
            self._adapters = None
            return
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="nemorl-adapters-") as folder:
            write_adapters(Path(folder), dict(unpacked(adapters)))
            # In place: requests in flight go on with them.
            self._llm.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            self._adapters = LoRARequest("policy", 1, folder)

    def sleep(self) -> None:
        """Give memory back, at level 2 the weights', too; unfinished samples pause."""
        if self._sleep_level:
            self._llm.sleep(self._sleep_level, mode="keep")
            self.asleep = True
            self.usable = self.usable and self._sleep_level < 2

    def wake(self) -> None:
        if self._sleep_level:
            self._llm.wake_up()
            self.asleep = False

    def shutdown(self) -> None:
        self._llm.engine_core.shutdown()
        self._folder.close()


@contextmanager
def starting(spec: EngineSpec) -> Iterator[tuple[Any, bool]]:
    """Yield vLLM's EngineArgs, and whether it computes on a CPU. Raises EngineStartError for what
    the block raises.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nemorl-engine-") as folder:
            for name, content in spec.files.items():
                (Path(folder) / name).write_bytes(content)
            yield _engine_arguments(spec, folder)
    except Exception as error:
        _unlink_memory()
        raise EngineStartError(f"{_reason(error)} (so the vLLM engine could not start)") from error


def _engine_arguments(spec: EngineSpec, folder: str) -> tuple[Any, bool]:
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    try:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ImportError(
            f'vLLM can\'t be imported ({error}): pip install "nemorl[vllm]", or use'
            " generation.backend torch"
        ) from error
    known = {item.name for item in dataclasses.fields(EngineArgs)}
    for name in spec.engine:
        if name not in known:
            raise ValueError(
                f"unknown argument {name!r} in generation.engine{closest(name, known)}: use"
                " vLLM's own names, with _"
            )
    cpu = current_platform.is_cpu()
    _check(spec, cpu=cpu)
    own = {**(CPU_DEFAULTS if cpu else {}), **_arguments(spec, folder)}
    if spec.records_experts:
        own |= {"enable_prefix_caching": False} if cpu else {"enable_return_routed_experts": True}
    return EngineArgs(**{**own, **spec.engine}), cpu


def _is_split(spec: EngineSpec) -> bool:
    return spec.tensor_parallel_size * spec.pipeline_parallel_size > 1


@contextmanager
def own_folder() -> Iterator[None]:
    """Keep temporary files of this process and its children in a folder, removed at the end."""
    with suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cache_dir()  # compiled code stays where later engines find it
    with temporary_folder() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        try:
            yield
        finally:
            if tempfile.tempdir == str(folder):  # not another engine's
                tempfile.tempdir = os.environ["TMPDIR"] = TMPDIR


def _check(spec: EngineSpec, *, cpu: bool) -> None:
    replay, no_gpu = "with trainer.router_replay", "where there is no GPU"
    musts = dict[str, tuple[bool, str]]()
    if cpu:
        level = spec.sleep_level
        require(level == 0, "generation.sleep_level", f"must be 0 {no_gpu}", level, "remove it")
        musts["enable_chunked_prefill"] = False, no_gpu
    if spec.records_experts and cpu:  # or rejected tokens would be recorded, and cached ones not
        off = False, f"{replay} {no_gpu}"
        musts |= {"enable_prefix_caching": off, "speculative_config": off}
    elif spec.records_experts:  # vLLM keeps the experts beside the cache
        musts["enable_prefix_caching"] = True, replay
    for name, (on, where) in musts.items():
        value, must = spec.engine.get(name, on), f"must be {'on' if on else 'off'} {where}"
        require(bool(value) == on, f"generation.engine's {name}", must, value, "remove it")


def _arguments(spec: EngineSpec, folder: str) -> dict[str, Any]:
    config, scaled = json.loads(spec.files["config.json"]), "attn_temperature_tuning"
    own: dict[str, Any] = {}
    if _is_split(spec):  # or it would ask Ray for processes
        own["distributed_executor_backend"] = "mp"
    if spec.meeting is not None:
        stages = spec.pipeline_parallel_size
        own |= {"pipeline_parallel_size": stages, "nnodes": stages, "node_rank": spec.stage}
        own["master_addr"], own["master_port"] = spec.meeting
    if scaled in config:  # Llama 4's queries, or vLLM scales them by max_model_len
        own["override_generation_config"] = {scaled: config[scaled]}
    if spec.adapter_rank:
        rank = next(each for each in VLLM_RANKS if each >= spec.adapter_rank)
        own |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
    return {
        **own,
        "model": folder,
        "skip_tokenizer_init": spec.vocabulary is None,
        "dtype": spec.dtype,
        "max_num_seqs": spec.max_num_seqs,
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "load_format": "dummy",
        "trust_remote_code": spec.trust_remote_code,
        "weight_transfer_config": {"backend": "nemorl"},
        "worker_extension_cls": "nemorl.runtime.engines.receiver.WorkerExtension",
        "enable_sleep_mode": spec.sleep_level > 0,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
    }


def _unlink_memory(worker: Any = None) -> None:
    """Remove the names of memory that vLLM's processes share."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text(encoding="utf-8") if maps.exists() else ""
    for name in re.findall(r"/dev/shm/(?:psm_|\S+-cpushm_)\S+", mapped):
        Path(name).unlink(missing_ok=True)
    SharedMemory.unlink = _unlink  # type: ignore[assignment, method-assign]


def _unlink(memory: SharedMemory) -> None:
    (Path("/dev/shm") / memory.name).unlink(missing_ok=True)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")


def _clear_cache(worker: Any) -> None:
    """Zero the cache: one number that is not finite spoils its block."""
    for cache in worker.model_runner.kv_caches:
        for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
            tensor.zero_()


def _reason(error: BaseException) -> str:
    text, errors = str(error).strip() or repr(error), getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        text = "; ".join(
            ": ".join([*map(str, item["loc"]), item["msg"].removeprefix("Value error, ")])
            for item in errors()
        )
    elif "root cause" in text and (output := Path("/proc/self/fd/1")).is_file():
        log = output.read_text(encoding="utf-8", errors="replace")
        last = re.compile(r"^.*\] ((?:\w+\.)*\w+(?:Error|Exception): .*)$", re.MULTILINE)
        text = [text, *last.findall(log)][-1]
    return text if len(text) < 500 else f"{text[:500]} …"  # some list all names that are right


class EngineActor:
    """One engine in an asynchronous actor, on a thread of its own."""

    make: Callable[[EngineSpec], Any] = VLLMEngine

    def __init__(self, name: str, log: str) -> None:
        begin_worker(name, Path(log))
        self._thread = ThreadPoolExecutor(1, "engine")
        self._waiting: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        self._ids = itertools.count()
        self._stepping, self._progress, self._partial, self._busy_s = False, 0, 0, 0.0

    async def meet(self, spec: EngineSpec) -> EngineSpec:
        return replace(spec, meeting=(own_address(), free_port()))

    async def run_stage(self, spec: EngineSpec) -> None:
        """Run a later stage's workers, until one ends, and with it the others. Raises
        EngineStartError.
        """
        await asyncio.to_thread(_run_stage, spec)

    async def start(self, spec: EngineSpec) -> Place:
        """Start the engine. Raises EngineStartError."""
        self._loop = asyncio.get_running_loop()
        self._engine = await self._loop.run_in_executor(self._thread, self.make, spec)
        return Place(
            node=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))),
            uuids=self._engine.uuids,
        )

    async def sample(self, prompt: tuple[int, ...], params: SamplingParams | Scoring) -> Answer:
        """Return the samples of a prompt, or the scores of its tokens.

        params: with a seed, every token that ends a response, and a length that fits.
        """
        id = next(self._ids)
        self._waiting[id] = self._loop.create_future()
        try:
            await self.call("add", id, prompt, params)
            samples = await self._waiting[id]
        except BaseException:
            self._thread.submit(self._do, "abort", id)
            raise
        finally:
            del self._waiting[id]
        return Answer(samples, self._partial, self._busy_s)

    async def progress(self) -> int:
        """Return a number that grows while the engine works."""
        return self._progress

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine before its next step."""
        return await self._loop.run_in_executor(self._thread, self._do, method, *args)

    def _do(self, method: str, *args: Any) -> Any:
        self._progress += 1
        try:
            return getattr(self._engine, method)(*args)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        """Step after all calls that wait."""
        if self._engine.busy and not self._stepping:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        self._stepping = False
        if not self._engine.busy:  # a call has ended the work
            return
        begin = time.perf_counter()
        try:
            answers: dict[int, Any] = self._engine.step()
            self._progress += 1
        except Exception as error:
            with suppress(Exception):  # the engine may be broken
                self._engine.abort_all()
            answers = dict.fromkeys(list(self._waiting), error)
        self._partial = self._engine.partial
        self._busy_s += time.perf_counter() - begin
        self._loop.call_soon_threadsafe(self._answer, answers)
        self._go_on()

    def _answer(self, answers: Mapping[int, Any]) -> None:
        """On the event loop."""
        for id, answer in answers.items():
            future = self._waiting.get(id)
            if future is None or future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def own_address() -> str:
    """Return this node's address in Ray, which vLLM's processes here are to use, too."""
    address = os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    return address


def _run_stage(spec: EngineSpec) -> None:
    own_address()
    with own_folder():
        with starting(spec) as (arguments, _):
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            config = arguments.create_engine_config(headless=True)
            executor = MultiprocExecutor(config, monitor_workers=False)
        executor.start_worker_monitor(inline=True)
