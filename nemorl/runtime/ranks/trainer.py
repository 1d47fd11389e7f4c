"""One model on many ranks, as one `TrainingBackend`: the loop that drives it does not know the
difference.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import Metrics
from nemorl.models.adapters import CONFIG, base_of
from nemorl.parallel.backend import LossFn
from nemorl.parallel.config import BackendConfig
from nemorl.runtime.ranks.group import STATUS_S, Ongoing, RankGroup, Status, gather, worst
from nemorl.runtime.ranks.rank import BESIDE
from nemorl.runtime.ranks.wire import dumps
from nemorl.runtime.run.errors import raised

SHUTDOWN_S = 20.0
"""For ranks to end in order."""
PROFILED_SHUTDOWN_S = 120.0
"""Where they may have a profile to write first."""


class RankedTrainer:
    """Ranks, which `start` starts, behind the `TrainingBackend` Protocol: each call goes to all of
    them, and rank 0's answer comes back.

    What all ranks raise is raised here, as of the type that it is, and they stay usable. Where one
    of them dies (WorkerDied), none answers within `timeout_s` (WorkerTimeout; `start_timeout_s` for
    setup) or one fails alone, all are ended at once; the errors name rank, host, process, step and
    method. Methods may be called from several threads.
    """

    def __init__(
        self, start: Callable[[], RankGroup], *, timeout_s: float, start_timeout_s: float
    ) -> None:
        self._start, self._timeout_s, self._start_timeout_s = start, timeout_s, start_timeout_s
        self._group: RankGroup | None = None
        self._model: nn.Module | None = None
        self._lost: BaseException | None = None
        self._losing, self._shutdown_s = threading.Lock(), SHUTDOWN_S
        self._exports, self._closed = itertools.count(), deque[int]()
        self.step = 0
        """Optimizer steps begun.

        While one is under way it counts as begun: nobody here knows whether it has.
        """
        self.farewell: Any = None
        """What torchrun's other processes are told at the shutdown:

        `serve_as_follower` returns it there.
        """

    def setup(self, config: BackendConfig) -> None:
        config = _findable(config)
        self._lost, self._shutdown_s = (
            None,
            SHUTDOWN_S if config.profile.steps is None else PROFILED_SHUTDOWN_S,
        )
        try:
            self._group = self._start()
            self._call("setup", config)
            self._model = structure(config.model.path)
        except BaseException:
            self._end()
            raise

    def statuses(self) -> Mapping[int, Status]:
        """What those ranks are doing that say it soon; none before they are started.

        For other threads than the one that waits for them.
        """
        group = self._group
        return {} if group is None else group.statuses(STATUS_S)

    @property
    def model(self) -> nn.Module:
        """The model as the ranks have it together, on the meta device: configuration, names and
        shapes, but no weights.
        """
        if self._model is None:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._model

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        before, self.step = self.step, self.step + 1
        try:
            call = self._begin("train_step", batch, loss_fn)
        except Exception:
            if not _can_be_sent((batch, loss_fn)):  # and so no rank has been told
                self.step = before
            raise
        return self._finish("train_step", call)

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._call("get_logprobs", batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._call("get_reference_logprobs", batch)

    def export_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights as CPU tensors (under torchrun where rank 0 has them), gathered bucket by
        bucket; with `dtype` cast before they are gathered.

        It may be left at any point. Raises RuntimeError if the trainer takes a step before it is
        through.
        """
        export, step = next(self._exports), self.step
        closed = [self._closed.popleft() for _ in range(len(self._closed))]
        try:
            self._call("export_open", export, closed, {} if dtype is None else {"dtype": dtype})
            following = self._begin("export_next", export)
            while (bucket := self._finish("export_weights", following)) is not None:
                following = self._begin("export_next", export)  # gathered while this one is used
                for name, tensor in bucket.tensors():
                    yield name, tensor if bucket.lasts else tensor.clone()
                    if self.step != step:
                        raise RuntimeError(
                            "weights must be read before the trainer's next step, but it has begun:"
                            " call export_weights() again"
                        )
        finally:
            self._closed.append(
                export
            )  # told with the next export: this may run at any time and on any thread, when the iterator is dropped

    def send_weights(
        self,
        send: Callable[[Iterator[tuple[str, Tensor]]], Any],
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Call `send` with the weights on rank 0, and return its result; the other ranks gather
        along.

        `send` must be picklable, and gets what `export_weights(dtype=dtype)` of rank 0's backend
        yields. What it raises is raised here; the ranks stay usable.
        """
        options = {} if dtype is None else {"dtype": dtype}
        result, failure = self._call("send_weights", send, options)
        if failure is not None:
            raise failure.error or raised(failure.value, 0)
        return result

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """With `background` it is written after this has returned; `wait_for_checkpoint` tells
        when.
        """
        self._call(
            "save_checkpoint", path.absolute(), **({"background": True} if background else {})
        )

    def wait_for_checkpoint(self) -> None:
        """Until what was saved in the background is written by all ranks; raises what went wrong.

        Other calls may go on meanwhile.
        """
        self._call("wait_for_checkpoint")

    def load_checkpoint(self, path: Path) -> None:
        self._call("load_checkpoint", path.absolute())

    def shutdown(self) -> None:
        self._end(self._shutdown_s)

    def _ready(self) -> RankGroup:
        if (group := self._group) is None:
            raise self._gone() from self._lost
        return group

    def _gone(self) -> RuntimeError:
        told = "call setup() first, and nothing after shutdown()"
        if self._lost is not None:
            told = f"its ranks were ended: {(str(self._lost) or repr(self._lost)).splitlines()[0]}"
        return RuntimeError(f"the training backend has no model: {told}")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._finish(
            "export_weights" if method == "export_open" else method,
            self._begin(method, *args, **kwargs),
        )

    def _begin(self, method: str, *args: Any, **kwargs: Any) -> Ongoing:
        group = self._ready()
        try:
            return group.start(method, *args, **kwargs)
        except Exception:
            if self._lost is not None:  # another thread has found out meanwhile, and ended them
                raise self._gone() from self._lost
            raise

    def _finish(self, method: str, call: Ongoing) -> Any:
        """Rank 0's result. Where the ranks are good for nothing any more they are ended."""
        group = self._ready()
        phase = (
            f"{method} of optimizer step {self.step}"
            if method == "train_step"
            else f"{method} after {self.step} optimizer steps"
        )
        limit = (
            ("runtime.start_timeout_s", self._start_timeout_s)
            if method == "setup"
            else ("runtime.timeout_s", self._timeout_s)
        )
        try:
            answers = gather(
                group,
                call,
                phase=phase,
                timeout_s=limit[1],
                limit=limit[0],
                in_background=method in BESIDE,
            )
        except Exception as error:  # WorkerDied, WorkerTimeout, or a cluster that is gone
            if not self._lose(error):
                raise self._gone() from self._lost
            raise
        steps = {answer.step for answer in answers.values()}
        failed = [rank for rank, answer in answers.items() if answer.kind == "error"]
        together = len(answers) == group.size and len(steps) == 1
        if (
            together and method != "wait_for_checkpoint"
        ):  # which may come from another thread, while a step is under way
            self.step = answers[0].step
        if not failed:
            return answers[0].value
        raising = worst(answers)
        if not together:
            where = " and ".join(str(group.place(rank)) for rank in sorted(failed))
            raising.add_note(
                f"raised by {where} in {phase}, but not by the other ranks: all were ended"
            )
            if not self._lose(raising):
                raise self._gone() from self._lost
        raise raising

    def _lose(self, error: BaseException) -> bool:
        """End the ranks for good.

        Whether this error is why: another thread may have noticed first, and what follows from that
        is no news.
        """
        with self._losing:
            first = self._lost is None
            if first:
                self._lost = error
        try:
            self._end()
        except Exception as failure:
            error.add_note(f"to end the ranks failed as well: {failure!r}")
        return first

    def _end(self, timeout_s: float = 0.0) -> None:
        group, self._group, self._model = self._group, None, None
        if group is not None:
            group.shutdown(timeout_s, self.farewell)


def _can_be_sent(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def structure(path: str) -> nn.Module:
    """The model of a folder or hub name on the meta device, with the configuration of one that is
    loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    path = base_of(Path(path)) or path if (Path(path) / CONFIG).is_file() else path
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.float32
        )
    with suppress(OSError, ValueError):  # there need not be one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _findable(config: BackendConfig) -> BackendConfig:
    """With paths that other processes find, whatever folder they are in."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if path and Path(path).exists() else path

    initial, folder = config.same_initial_model_as, config.profile.dir
    return replace(
        config,
        model=replace(config.model, path=absolute(config.model.path)),
        profile=replace(
            config.profile, dir=None if folder is None else str(Path(folder).absolute())
        ),
        same_initial_model_as=None if initial is None else initial.absolute(),
    )
