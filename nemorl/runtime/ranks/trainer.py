"""One model on many ranks as one `TrainingBackend`: the loop does not know the difference."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from nemorl.data.batch import TokenBatch
from nemorl.losses import Logprobs, Metrics, Needs
from nemorl.models.causal_lm import Head, from_config
from nemorl.models.hub import CONFIG, base_of, read_config
from nemorl.parallel.backend import ForwardOutput, InTurns, LossFn, Output
from nemorl.parallel.config import BackendConfig, OptimSettings
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import Completion
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.engines.weights import NamedTensor, Place
from nemorl.runtime.ranks import torchrun_size
from nemorl.runtime.ranks.rank import BACKGROUND, Coordinates, TorchrunRanks, dumps
from nemorl.runtime.store.files import raised

if TYPE_CHECKING:
    from nemorl.runtime.ranks.actors import RayRanks

SHUTDOWN_S = 120.0
"""For ranks to end in order, as they may write a profile."""
Ranks: TypeAlias = "RayRanks | TorchrunRanks"


def make_trainer(
    config: BaseConfig,
    make: Callable[[], Any],
    plan: ParallelPlan,
    log_dir: Path,
    engines: GenerationConfig | None = None,
) -> RankedTrainer:
    """Return the backend that `make` makes on the ranks of `plan`, as one.

    Its `setup` starts Ray actors, which write to `log_dir`/rank-N.log, or takes torchrun's
    processes, which call `follow`. engines: those that may share the ranks' GPUs.
    """

    def start() -> Ranks:
        if torchrun_size() is not None:
            return TorchrunRanks(make, plan.num_ranks, config)
        try:
            from nemorl.runtime.ranks.actors import RayRanks
        except ModuleNotFoundError as error:
            raise ValueError(
                "parallel with ranks needs Ray: pip install 'nemorl[titan]', or start the run with"
                " torchrun"
            ) from error
        return RayRanks(make, plan.num_ranks, config, log_dir, engines)

    return RankedTrainer(start)


class SharedRanks:
    """Ranks that `start` starts for the first backend on them."""

    def __init__(self, start: Callable[[], Ranks]) -> None:
        self.start, self._losing = start, threading.Lock()
        self.group: Ranks | None = None
        self.lost: BaseException | None = None

    def open(self) -> None:
        if self.group is None:
            self.lost, self.group = None, self.start()

    def lose(self, error: BaseException) -> bool:
        """End the ranks for good. Return whether this is the first error."""
        with self._losing:
            first = self.lost is None
            self.lost = self.lost or error
        with suppress(Exception):
            self.end()
        return first

    def end(self, timeout_s: float = 0.0, result: Any = None) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.shutdown(timeout_s, result)


class RankedTrainer(InTurns):
    """A `TrainingBackend` whose calls go to all ranks that `start` starts; rank 0 answers.

    What all ranks raise is raised here, and they stay usable. All are ended where one dies
    (WorkerDied), does not answer in time (WorkerTimeout), fails alone or raises RanksLost. Methods
    may be called from several threads.
    """

    def __init__(
        self, start: Callable[[], Ranks], *, name: str = "", ranks: SharedRanks | None = None
    ) -> None:
        self._name, self._ranks = name, ranks or SharedRanks(start)
        self._model: nn.Module | None = None
        self._exports = 0
        self._cutting: tuple[Any, ...] = ()
        self.step = 0
        """Optimizer steps begun."""
        self.result: Any = None
        """What `follow` returns in torchrun's other processes."""

    def setup(self, config: BackendConfig) -> None:
        config, self._cutting = _findable(config), ()
        try:
            self._ranks.open()
            self._call("setup", config)
            self._model = structure(
                config.model.path,
                trust_remote_code=config.model.trust_remote_code,
                head=config.head,
            )
        except BaseException:
            if not self._name:  # models beside it end no ranks
                self._ranks.end()
            raise

    def beside(self, name: str) -> RankedTrainer:
        """Return another model on these ranks, which stay until this one's `shutdown`."""
        return RankedTrainer(self._ranks.start, name=name, ranks=self._ranks)

    @property
    def model(self) -> nn.Module:
        """The model on the meta device."""
        if self._model is None or self._ranks.group is None:
            raise self._gone()
        return self._model

    @property
    def places(self) -> Sequence[Place]:
        """Where ranks are that Ray has placed; not known of torchrun's."""
        return () if self._ranks.group is None else self._ranks.group.places

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        return self._call("train_step", batch, loss_fn)

    def forward_backward(
        self, batch: TokenBatch, loss_fn: LossFn, *, token_logprobs: bool = False
    ) -> Output:
        options = {"token_logprobs": True} if token_logprobs else {}
        return self._call("forward_backward", batch, loss_fn, **options)

    def optim_step(self, settings: OptimSettings | None = None) -> Metrics:
        return self._call("optim_step", *(() if settings is None else (settings,)))

    def compute(self, batch: TokenBatch, needs: Needs) -> ForwardOutput:
        return self._call("compute", batch, needs)

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._call("get_logprobs", batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._call("get_reference_logprobs", batch)

    def weights(self, *, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        """Yield the weights as CPU tensors (under torchrun as rank 0 has them), cast to `dtype`.

        The iterator may be left at any point. Raises RuntimeError after a step or another export.
        """
        self._call("export_open", **({} if dtype is None else {"dtype": dtype}))
        self._exports += 1
        begun = self.step, self._exports
        while bucket := self._call("export_next"):
            for each in bucket:
                yield each
                if begun != (self.step, self._exports):
                    raise RuntimeError(
                        "weights must be read before the trainer's next step or export, but it"
                        " has begun: call weights() again"
                    )

    def send_weights(
        self,
        send: Callable[[Iterator[NamedTensor]], Any],
        *,
        dtype: torch.dtype | None = None,
        on_all_ranks: bool = False,
        **options: Any,
    ) -> Any:
        """Return `send(weights)` of rank 0, with the weights gathered in `dtype`. After an error of
        `send`, which must be picklable, the ranks stay usable.

        on_all_ranks: all ranks call it. options: of the backend's `weights`, such as `adapters`.
        """
        options |= {} if dtype is None else {"dtype": dtype}
        result, error = self._call("send_weights", send, on_all_ranks=on_all_ranks, **options)
        if error is not None:
            raise raised(error, 0)
        return result

    # For `RankedGenerator`, of backends that generate.

    def open_engine(self, **options: Any) -> dict[str, tuple[int, ...]]:
        return self._call("open_engine", **options)

    def decode(self, order: Any) -> tuple[dict[int, list[Completion]], float]:
        return self._call("decode", order)

    def take_weights(self, weights: dict[str, Tensor], version: int) -> dict[str, Tensor]:
        return self._call("take_weights", weights, version)

    def offload(self, *, keep_weights: bool = False) -> None:
        self._call("offload", keep_weights=keep_weights)

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        self._call("save_checkpoint", path.absolute(), background=background)

    def wait_for_checkpoint(self) -> None:
        self._call("wait_for_checkpoint")

    def load_checkpoint(self, path: Path, **options: bool) -> None:
        self._call("load_checkpoint", path.absolute(), **options)

    def shutdown(self) -> None:
        self._model = None
        if not self._name:
            self._ranks.end(SHUTDOWN_S, self.result)
        elif self._ranks.group is not None:
            self._call("release")

    def _gone(self) -> RuntimeError:
        reason, lost = "call setup() first, and nothing after shutdown()", self._ranks.lost
        if lost is not None:
            reason = f"its ranks were ended: {(str(lost) or repr(lost)).splitlines()[0]}"
        return RuntimeError(f"the training backend has no model: {reason}")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return rank 0's result. Ranks of no further use are ended."""
        if (group := self._ranks.group) is None:
            raise self._gone() from self._ranks.lost
        args, parts = self._routes_apart(method, args)
        payload = dumps((args, {"backend": self._name, **kwargs}))
        at = f"after {self.step} optimizer steps"
        if method in ("train_step", "optim_step"):
            self.step += 1
            at = f"of optimizer step {self.step}"
        try:
            answer = group.call(method, payload, f"{method} {at}", parts)
        except Exception as error:
            if not self._ranks.lose(error):
                raise self._gone() from self._ranks.lost
            raise
        if method not in BACKGROUND:
            self.step = answer.step
        if answer.error is not None:
            raise raised(answer.error, 0)
        return answer.value

    def _routes_apart(
        self, method: str, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[Coordinates, list[Any]]]:
        """Return arguments without a batch's routes, and each rank's part of these."""
        parts: dict[Coordinates, list[Any]] = {}
        if not args or getattr(args[0], "routed_experts", None) is None:
            return args, parts
        if not self._cutting:
            self._cutting = (self._call("cutting"),)
        if (cutting := self._cutting[0]) is None:
            return args, parts
        if cutting.trainer.router_replay and method != "get_reference_logprobs":
            parts = {place: dumps(part) for place, part in cutting.routes(args[0]).items()}
        return (replace(args[0], routed_experts=None), *args[1:]), parts


def structure(path: str, *, trust_remote_code: bool = False, head: Head = "lm") -> nn.Module:
    """Return the model of a folder or hub name, on the meta device."""
    from transformers import GenerationConfig

    path = base_of(Path(path)) or path if (Path(path) / CONFIG).is_file() else path
    trust = {"trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        model = from_config(read_config(path, **trust), head, **trust)
    with suppress(OSError, ValueError):  # there need not be one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _findable(config: BackendConfig) -> BackendConfig:
    path, initial, folder = config.model.path, config.same_initial_model_as, config.profile.dir
    if path and Path(path).exists():
        path = str(Path(path).absolute())
    return replace(
        config,
        model=replace(config.model, path=path),
        profile=replace(config.profile, dir=folder and str(Path(folder).absolute())),
        same_initial_model_as=initial and initial.absolute(),
    )
