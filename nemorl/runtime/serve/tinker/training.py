"""Models in training: their requests one after another, on one thread."""

import asyncio
import json
import logging
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemorl.losses.types import Needs, finalize
from nemorl.parallel.config import LoRAConfig, OptimSettings
from nemorl.runtime.serve.tinker import store
from nemorl.runtime.serve.tinker.data import read_work
from nemorl.runtime.serve.tinker.messages import Fields, read_fields, read_work_message
from nemorl.runtime.serve.wire import Json, Refused, demand
from nemorl.runtime.store.export import write_pretrained
from nemorl.runtime.store.files import NotWritten

LOGGER = logging.getLogger("nemorl")
LIVE = 8
"""Adapters in memory; a whole model leaves room for one."""
SAVED_SHARE = 0.04
"""Of the time, for restart points."""
KEPT = "rank", "seed", "train_attn", "train_mlp"
"""Of a model, in its states."""
KEPT_ANSWERS = 1_000
KEPT_SAMPLERS = 64
"""Without a name, of adapters; of a whole model an eighth."""


class OfModel(Fields):
    model_id: str
    seq_id: int


class Adam(Fields):
    lr: float = Field(default=1e-4, ge=0, alias="learning_rate")
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = Field(default=0.0, ge=0, alias="grad_clip_norm")


class OptimStep(OfModel):
    adam_params: Adam


class Save(OfModel):
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=1, le=store.LONGEST_TTL)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot"] = "snapshot"


class LoadWeights(OfModel):
    path: str
    optimizer: bool


def failed(error: Exception, request: str) -> bytes:
    """Return the answer to a request that raised an error."""
    if isinstance(error, (Refused, FloatingPointError, NotWritten)):
        return store.failure(str(error))
    LOGGER.error("request %s failed", request, exc_info=error)
    return store.failure(f"{type(error).__name__}: {error}", "server")


@dataclass(eq=False)
class Recipient:
    """A sampler or a model: to it clients send numbered requests."""

    folder: Path
    file: ClassVar = "sampler.json"

    def __post_init__(self) -> None:
        self.id, self.stream = self.folder.name, store.Stream(self.folder)
        self.about: Json = json.loads((self.folder / self.file).read_bytes())
        self.session = self.id.partition(":")[0]
        self.answered = defaultdict[int, asyncio.Event](asyncio.Event)
        """By request that someone waits for."""

    def finished(self, number: int) -> None:
        """Wake those who wait for an answer."""
        self.answered.pop(number, asyncio.Event()).set()


@dataclass(eq=False)
class Model(Recipient):
    """A model in training."""

    file = "model.json"
    next: int = 0
    """The first request without an answer; 0 makes the model."""
    backend: Any = None
    gradients: int = 0
    """Requests whose gradient the next step takes."""
    changes: int = field(default_factory=time.time_ns)
    """Of the weights: tells whether they are still a sampler's, in no other process the same."""
    spent: float = 0.0
    """Seconds of work since the restart point."""
    queued: bool = False
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def restarts_after(self) -> int:
        """The last request in the restart point; -1 without one."""
        return (store.about_of(self.folder / "restart") or {"seq_id": -1})["seq_id"]

    def state(self, number: int) -> Json:
        """Return what a state saved by a request is of."""
        return {name: self.about[name] for name in KEPT} | {"seq_id": number, "time": store.now()}


@dataclass(kw_only=True)
class ModelTrainer:
    """Executes requests of models, on one thread."""

    root: Path
    open: Callable[[LoRAConfig, int], Any]
    """Gives the context of a new training backend, by its adapters and seed."""
    layers: Mapping[str, set[str]]
    """Names of the layers of train_attn and of train_mlp."""
    tokenizer: Any
    vocab_size: int
    longest: int
    begin: Callable[[], Any]
    """Has the engine leave the device, where they take turns."""
    count: Callable[[str, int], Any]
    """Counts tokens of a kind."""
    device: AbstractAsyncContextManager[Any]
    """Held by the one whose turn it is."""
    waits: bool = False
    """Whether it waits for its turn."""

    def __post_init__(self) -> None:
        self.live: dict[Model, int] = {}
        """Models in memory, that used last at the end, and the room they take."""
        self.owners: dict[str, str] = {}
        """Of sessions: names of keys."""
        self.thread = ThreadPoolExecutor(1, "nemorl-trainer")
        self._save_s = 0.2

    async def call(self, work: Callable[..., Any], *args: Any) -> None:
        """Call a function on the thread."""
        await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)

    def state_of(self, path: str, owner: str, *kinds: str) -> tuple[Path, Json]:
        """Return an owner's saved state. Raises: Refused where there is none."""
        folder = store.folder_of(self.root, path, *kinds)
        about = store.about_of(folder)
        if about is None or self.owners.get(folder.parts[-3].partition(":")[0]) != owner:
            raise Refused(f"there is no saved state {path}: list them", status=404)
        return folder, about

    def execute(self, model: Model) -> None:
        """Execute a model's next request, and record its answer or error."""
        number, began = model.next, time.monotonic()
        verb, body = model.stream.request(number) or ("", b"")
        try:
            made = model.stream.answer(0) or b""
            must = f"must be of a model that could be made, unlike this: {made[1:].decode()[:500]}"
            demand(store.category(made) is None, "model_id", must, "make another")
            self.begin()
            self._open(model, number)
            answer = self._execute(model, number, verb, body)
        except Exception as error:  # the others go on
            answer = failed(error, f"{model.id}#{number}")
        kind = store.category(answer)
        if kind == "server":
            self.close(model)  # what it has in memory may be wrong
        model.spent += time.monotonic() - began
        model.stream.record(number, answer)
        model.next += 1
        # What was loaded may be deleted.
        loaded = verb == "load_weights" or (not number and model.about["loaded"])
        due = verb == "optim_step" and model.spent > self._save_s / SAVED_SHARE
        if not kind and (loaded or due):
            self._save_restart(model)

    def close(self, model: Model) -> None:
        """Free a model's memory. It comes back with its next request."""
        self.live.pop(model, None)
        model.backend, model.gradients = None, 0
        with suppress(Exception):  # its ranks may be dead
            model.closing.close()

    def leave(self, model: Model) -> None:
        """Free a model's memory, after a restart point where one can be."""
        if not model.gradients and model.spent:
            self._save_restart(model)
        self.close(model)

    def _open(self, model: Model, number: int) -> None:
        """Give a model a live backend that has executed all requests before `number`."""
        if model.backend is not None:
            self.live[model] = self.live.pop(model)
            return
        about, room = model.about, 1 if model.about["rank"] else LIVE - 1
        while self.live and sum(self.live.values()) + room > LIVE:
            self.leave(next(iter(self.live)))
        chosen, targets = [part for part in self.layers if about[part]], set[str]()
        if about["rank"] and len(chosen) < len(self.layers):
            fits, targets = not set.intersection(*self.layers.values()), self.layers[chosen[0]]
            must = "must be alike: their layers share names"
            demand(fits, "train_attn and train_mlp", must, "set both")
        lora = LoRAConfig(rank=about["rank"], target_modules=tuple(sorted(targets)))
        model.backend = model.closing.enter_context(self.open(lora, about["seed"]))
        self.live[model], model.spent = room, 0.0
        model.changes += 1
        if (done := model.restarts_after) >= 0:
            model.backend.load_checkpoint(model.folder / "restart")
        self._replay(model, done + 1, number)

    def _replay(self, model: Model, begin: int, end: int) -> None:
        """Execute answered requests again, but those whose gradient an ended backend took along.
        What failed then may fail again.
        """
        again, since = list[Any](), 0
        for number in range(begin, end):
            found = model.stream.request(number)
            if found is None or found[0].startswith(("save", "forward_only")):
                continue
            kind = store.category(model.stream.answer(number) or b"")
            if kind == "server":
                del again[since:]
            else:
                again.append((kind, number, *found))
            if found[0] != "forward_backward":
                since = len(again)
        for kind, *request in again:
            with suppress(*(Refused, FloatingPointError) * bool(kind)):
                self._execute(model, *request)

    def _execute(self, model: Model, number: int, verb: str, body: bytes) -> bytes:
        match verb:
            case "create_model":
                if path := model.about["loaded"]:
                    self._load(model, path, model.about["with_optimizer"])
                found: Json = {"model_id": model.id}
            case "forward_backward" | "forward_only":
                return b"P" + self._forward(model, body, backward=verb != "forward_only")
            case "optim_step":
                found = self._step(model, read_fields(OptimStep, body).adam_params)
            case "load_weights":
                asked = read_fields(LoadWeights, body)
                must = "must be a model's first request"
                demand(number == 1, "load_weights", must, "create a client from the state")
                self._load(model, asked.path, asked.optimizer)
                found = {"path": asked.path, "model_id": model.id}
            case "save_weights" | "save_weights_for_sampler":
                kind = "weights" if verb == "save_weights" else "sampler_weights"
                found = self._save(model, kind, read_fields(Save, body), number)
            case _:
                raise Refused(f"{verb} is not of this service: use save_weights_for_sampler")
        return b"J" + json.dumps(found).encode()

    def _load(self, model: Model, path: str, with_optimizer: bool) -> None:
        folder, about = self.state_of(path, self.owners[model.session], "weights")
        for name in ("rank", "train_attn", "train_mlp"):
            must = f"must have {name} {model.about[name]}, but has {about[name]}"
            demand(about[name] == model.about[name], "path", must, "create a client from it")
        model.backend.load_checkpoint(folder, optimizer=with_optimizer)
        model.changes += 1

    def _forward(self, model: Model, body: bytes, *, backward: bool) -> bytes:
        # A token more than the input is in a batch: the last target.
        sizes = {"vocab_size": self.vocab_size, "longest": self.longest - 1}
        work, backend = read_work(read_work_message(body), **sizes), model.backend
        batch, soft = work.batch, work.soft
        if backward:
            output = backend.forward_backward(batch, work.loss, token_logprobs=not soft)
            model.gradients += 1
            loss, logprobs = finalize(output.metrics)["loss"], output.token_logprobs
        if soft or not backward:
            found = backend.compute(batch, Needs(targets=soft))
            logprobs = found.target_logprobs if soft else found.token_logprobs
        if not backward:
            if soft:
                shares = batch.target_weights * logprobs.clamp(min=-1e30)
                found.token_logprobs = shares.sum(-1)
            loss = float(work.loss(found, batch).loss)
        self.count("trained", batch.num_tokens * backward)
        return work.answer(logprobs, loss)

    def _step(self, model: Model, adam: Adam) -> Json:
        adam.max_grad_norm = adam.max_grad_norm or math.inf
        try:
            settings = OptimSettings(**adam.model_dump(exclude={"type"}))
        except ValueError as error:
            raise Refused(str(error)) from error
        demand(model.gradients > 0, "optim_step", "needs a gradient", "send forward_backward")
        model.gradients = 0
        metrics = finalize(model.backend.optim_step(settings))
        model.changes += 1
        return {"metrics": {k: v for k, v in metrics.items() if math.isfinite(v)}}

    def _save(self, model: Model, kind: str, asked: Save, number: int) -> Json:
        place, name, rank = asked.sampling_session_seq_id, asked.path, model.about["rank"]
        fits = name is not None if place is None else name is None and kind == "sampler_weights"
        demand(fits, "path", "or sampling_session_seq_id (of samplers) must be given", "give one")
        must = "must be letters, digits, _, . and -, at most 128, a letter or digit first"
        demand(name is None or bool(store.NAME.fullmatch(name)), "path", must, "rename it")
        folder = model.folder / kind / (f"_{place}" if name is None else name)
        about = model.state(number) | {
            "metadata": asked.user_metadata,
            "expires": asked.ttl_seconds and time.time() + asked.ttl_seconds,
            "named": name is not None,
        }

        def write(aside: Path) -> None:
            if kind == "weights" or rank:
                model.backend.save_checkpoint(aside)
            else:  # a third of the state
                parts = model.backend.weights(), model.backend.model, self.tokenizer
                write_pretrained(aside / "model", *parts)

        store.write_state(folder, about, write, overwrite=asked.overwrite)
        path = store.path_of(folder)
        if name is not None:
            return {"path": path}
        unnamed = sorted(folder.parent.glob("_*"), key=lambda each: each.stat().st_mtime)
        for old in unnamed[: -KEPT_SAMPLERS // (1 if rank else 8)]:
            shutil.rmtree(old, ignore_errors=True)
        sampler = {"model_path": path, "seq_id": number, "changes": model.changes}
        id = f"{model.session}:sample:{place}"
        store.write_sampler(self.root / "samplers" / id, sampler)
        return {"sampling_session_id": id}

    def _save_restart(self, model: Model) -> None:
        began, number, before = time.monotonic(), model.next - 1, model.restarts_after
        save = model.backend.save_checkpoint
        try:
            store.write_state(model.folder / "restart", model.state(number), save)
        except Exception as error:
            LOGGER.warning("%s has no new restart point: %s", model.id, error)
            return
        self._save_s, model.spent = time.monotonic() - began, 0.0
        model.stream.forget("requests", before=model.next)
        model.stream.forget("answers", before=min(before, number - KEPT_ANSWERS))
