"""Which weights the replicas are to have, and when they get them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from nemorl.models.digest import WeightsDiffer
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import InFlight, Weights, WeightSource
from nemorl.runtime.engines.processes import EngineProcess, EngineProcesses, tell
from nemorl.runtime.engines.router import Router
from nemorl.runtime.engines.routing import Broke, Held, Published, Stopped, Supplied
from nemorl.runtime.engines.spec import EngineSpec
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
        self._expected = expected_weights(spec.files["config.json"])
        self._source: WeightSource = Weights(version=0, tensors=())
        self._sending, self._version = threading.RLock(), 0
        self._told: set[str] = set()
        self._receipts: list[Receipt] = []
        """Receipts since the last metrics."""

    def update(self, source: WeightSource, in_flight: InFlight = "keep") -> int:
        """Give all replicas that are up the newest weights, and return their version; the others
        get weights before they are used.

        Raises what was wrong with them; then nothing can be generated until an update succeeds, and
        requests in flight fail.
        """
        router = self._router
        try:
            if in_flight == "wait":
                router.send(Held(True))
                router.do(router.until(lambda state: state.drained), meanwhile=self.others)
            with self._sending:
                self._source = source
                router.send(Published(source.newest()[0]))
            while not router.state.supplied:
                if router.state.over:
                    raise router.state.over
                if not self.now():
                    router.pause()
            return self._version
        except BaseException as error:
            failed = f"an update of the weights failed while the request was in flight: {error}"
            with suppress(Exception):
                router.send(Stopped(RuntimeError(failed)))
            raise
        finally:
            with suppress(RuntimeError):  # it has been shut down meanwhile
                router.send(Held(False))

    def now(self) -> bool:
        """Send the newest weights to replicas without any, unless they sleep; return whether there
        were such.
        """
        with self._sending:
            if self._router.state.asleep:
                return False
            lacking = self._router.state.lacking
            processes = [one for id in lacking if (one := self._processes.running.get(id))]
            if processes:
                self._send({one.id.rank: one for one in processes})
            return bool(processes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have nothing sent inside the block, which begins once what is under way has ended."""
        with self._sending:
            yield

    def others(self) -> None:
        """Send weights to replicas that came back. It may fail while others have weights, but for
        an engine that holds others than it was sent.
        """
        try:
            self.now()
        except Exception as error:
            if isinstance(error, WeightsDiffer) or not self._router.state.supplied:
                raise
            if str(error) not in self._told:
                self._told.add(str(error))
                tell(
                    f"a replica that came back has no weights yet, because sending failed: {error}"
                )

    def _send(self, processes: dict[int, EngineProcess]) -> None:
        sender = WeightSender(
            actors={rank: one.actor for rank, one in processes.items()},
            places={rank: one.place for rank, one in processes.items() if one.place},
            expected=self._expected,
            dtype=getattr(torch, self.spec.dtype),
            transport=self.config.weight_transport,
            processes=self.config.tensor_parallel_size,
            timeout_s=self.config.timeout_s,
        )
        receipt = self._source.send(sender, dtype=sender.dtype)
        self._router.check()
        receipt.check()
        for rank, said in receipt.failed.items():
            self._router.send(Broke(processes[rank].id, processes[rank].died(said)))
        if not receipt.failed:
            self._receipts.append(receipt)
            self._version = receipt.version
            if receipt.version < (self._router.state.version or 0):  # an old checkpoint was loaded
                self._router.send(Published(receipt.version))
            for one in processes.values():
                self._router.send(Supplied(one.id, receipt.version))

    def metrics(self) -> dict[str, float]:
        """Return how many versions engines proved to have since the last call, and of how many
        weights of the last one.
        """
        receipts, self._receipts = self._receipts, []
        if not receipts:
            return {}
        last = receipts[-1]
        return {
            "weights/versions_proved": float(len({one.version for one in receipts})),
            "weights/proved": float(last.num_weights - len(last.unproved)),
            "weights/unproved": float(len(last.unproved)),
        }
