"""Which weights the replicas are to have, and when they get them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from nemorl.models.digest import WeightsDiffer
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import InFlight, Weights, WeightSource
from nemorl.runtime.engines.processes import EngineProcess, EngineProcesses, warn_softly
from nemorl.runtime.engines.routing import Broke, Held, Published, Router, Stopped, Supplied
from nemorl.runtime.engines.spec import EngineSpec
from nemorl.runtime.engines.transport import Transport
from nemorl.runtime.engines.weights import Receipt, WeightSender, expected_weights


class Supply:
    """Sends the newest weights of a source to replicas without any, from any thread.

    A replica that comes back gets what is newest then, which the others may not have yet.
    """

    def __init__(
        self,
        config: GenerationConfig,
        spec: EngineSpec,
        processes: EngineProcesses,
        router: Router,
    ) -> None:
        self.config, self.spec, self._processes, self._router = config, spec, processes, router
        self._expected, self._stored = expected_weights(spec.files["config.json"])
        self._source: WeightSource = Weights(version=0, tensors=())
        self._version = 0
        self.sending = threading.RLock()
        """Held while weights are sent."""
        self._told: set[str] = set()
        self._based = set[Any]()
        """Ids of the processes that have the weights without adapters."""
        self.transport: Transport | None = None
        self._receipt: Receipt | None = None

    def update(self, source: WeightSource, in_flight: InFlight = "keep") -> int:
        """Give all replicas that are up the newest weights, and return their version; the others
        get weights before they are used.

        Raises what was wrong; then requests in flight fail, and nothing can be generated until an
        update succeeds.
        """
        router = self._router
        try:
            if in_flight == "wait":
                router.send(Held(True))
                router.do(router.until(lambda state: state.drained))
            with self.sending:
                self._source = source
                router.send(Published(source.newest()[0]))
            while not router.state.supplied:
                router.do(router.until(lambda state: bool(state.over or state.lacking)))
                if router.state.over:
                    raise router.state.over
                self.now()
            return self._version
        except BaseException as error:
            failed = f"an update of the weights failed while the request was in flight: {error}"
            with suppress(Exception):
                router.send(Stopped(RuntimeError(failed)))
            raise
        finally:
            with suppress(RuntimeError):  # it has been shut down meanwhile
                router.send(Held(False))

    def now(self) -> None:
        """Unless they sleep."""
        with self.sending:
            state = self._router.state
            lacking = () if state.asleep else state.lacking
            processes = [one for id in lacking if (one := self._processes.running.get(id))]
            if processes:
                self._send({one.id.rank: one for one in processes})

    def others(self) -> None:
        """Send weights to replicas that came back. A failure, but for WeightsDiffer, is a warning
        while another has weights.
        """
        try:
            self.now()
        except Exception as error:
            if isinstance(error, WeightsDiffer) or not self._router.state.supplied:
                raise
            if str(error) not in self._told:
                self._told.add(str(error))
                warn_softly(
                    "a replica that came back has no weights yet, and nemorl keeps trying:"
                    f" sending failed: {error}"
                )

    def _send(self, processes: dict[int, EngineProcess]) -> None:
        alone = self.spec.adapter_rank or self.spec.pipeline_parallel_size > 1
        sender = WeightSender(
            actors={rank: one.actor for rank, one in processes.items()},
            places={rank: one.place for rank, one in processes.items() if one.place},
            expected=self._expected,
            stored=self._stored,
            dtype=getattr(torch, self.spec.dtype),
            transport="object_store" if alone else self.config.weight_transport,
            processes=self.config.devices_per_replica,
            timeout_s=self.config.timeout_s,
        )
        options: dict[str, Any] = {}
        if self.spec.adapter_rank:
            based = {one.id for one in processes.values()} <= self._based
            options["adapters"] = "alone" if based else "apart"
        receipt = self._source.send(sender, dtype=sender.dtype, **options)
        self.transport = receipt.transport
        self._router.check()
        receipt.check()
        for rank, said in receipt.failed.items():
            self._router.send(Broke(processes[rank].id, processes[rank].refused(said)))
        if not receipt.failed:
            self._receipt, self._version = receipt, receipt.version
            if receipt.version < (self._router.state.version or 0):  # an old checkpoint was loaded
                self._router.send(Published(receipt.version))
            self._based |= {one.id for one in processes.values()}
            for one in processes.values():
                self._router.send(Supplied(one.id, receipt.version))

    def metrics(self) -> dict[str, float]:
        last, self._receipt = self._receipt, None
        return {} if last is None else {"weights/proved": float(last.num_weights)}
