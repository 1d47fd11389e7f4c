"""The later stages of an engine's pipeline: workers that obey the first stage's engine."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ray

from nemorl.runtime.cluster.worker_group import begin_worker, free_port
from nemorl.runtime.engines.engine import (
    engine_arguments,
    model_folder,
    own_folder,
    start_errors,
)
from nemorl.runtime.engines.spec import EngineSpec


def meet(spec: EngineSpec) -> EngineSpec:
    """Return the engine with this process as the one at which its stages meet."""
    return replace(spec, meeting=(own_address(), free_port()))


def own_address() -> str:
    """Return this node's address in Ray, and have vLLM's processes here use it, too."""
    address = os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    return address


class Stage:
    """The workers of one stage, by vLLM's executor for further nodes. Raises EngineStartError."""

    def __init__(self, spec: EngineSpec) -> None:
        own_address()
        self._own = ExitStack()
        self._own.enter_context(own_folder())
        with start_errors(self._own), model_folder(spec) as folder:
            arguments, _ = engine_arguments(spec, folder)
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            config = arguments.create_engine_config(headless=True)
            self._executor = MultiprocExecutor(config, monitor_workers=False)

    def wait(self) -> None:
        """Return when a worker has ended; the others are ended then."""
        self._executor.start_worker_monitor(inline=True)


class StageActor:
    """The Ray actor around a stage."""

    make = Stage

    def __init__(self, name: str, log: str) -> None:
        begin_worker(name, Path(log))
        self._thread = ThreadPoolExecutor(1, "stage")

    async def run(self, spec: EngineSpec) -> None:
        """Start the workers and return when one has ended. Raises EngineStartError."""
        loop = asyncio.get_running_loop()
        stage = await loop.run_in_executor(self._thread, self.make, spec)
        await loop.run_in_executor(self._thread, stage.wait)
