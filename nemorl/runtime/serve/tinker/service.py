"""The service: sessions, requests and their futures."""

import asyncio
import json
import re
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nemorl.runtime.serve.tinker import store
from nemorl.runtime.serve.tinker.messages import F, Fields, read_fields, read_work_message
from nemorl.runtime.serve.tinker.sampling import Engine, SampleBody
from nemorl.runtime.serve.tinker.training import KEPT, Model, ModelTrainer, Recipient
from nemorl.runtime.serve.wire import Json, Refused, demand

MOST_JSON = 4 << 20
"""Reading it keeps all others waiting."""
MOST_AHEAD = 10_000
TURN_S = 1.0
"""A model goes on so long while others wait, which may need its memory."""
HOLD_S = 25.0
"""So long a question waits for its result."""
FORGET_S = 7 * 86_400.0
"""A session without a heartbeat loses its samplers."""
REQUEST = re.compile(r"([0-9a-f]{32}:(?:train|sample):\d{1,9})#(\d{1,18})", re.ASCII)
Place = Annotated[int, Field(ge=0, lt=10**9)]


class Lora(Fields):
    rank: int = Field(ge=0, le=1024)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Fields):
    type: Literal["adamw"] = "adamw"


class New(Fields):
    session_id: str
    model_seq_id: Place
    optimizer_config: Optimizer | None = None
    user_metadata: Json | None = None


class CreateModel(New):
    base_model: str
    lora_config: Lora


class LoadModel(New):
    path: str
    optimizer: bool
    base_model: str | None = None
    weights_access_token: None = None


class CreateSampler(Fields):
    session_id: str
    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class TinkerCall:
    """An HTTP request."""

    owner: str
    """The name of its key."""
    body: bytes
    path: Mapping[str, str]
    query: Mapping[str, str]

    def read(self, kind: type[F]) -> F:
        """Return the body's fields. Raises: Refused."""
        return read_fields(kind, self.text)

    @property
    def text(self) -> bytes:
        if len(self.body) > MOST_JSON:
            raise Refused(f"JSON must be at most {MOST_JSON >> 20} MB: send less", status=413)
        return self.body

    @cached_property
    def json(self) -> Json:
        """The body as an object. Raises: Refused."""
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(self.text), dict):
                return found
        raise Refused("the body must be a JSON object: correct it")


@dataclass(kw_only=True)
class Service:
    """Sessions of clients over one base model, on one event loop."""

    root: Path
    model: str
    """The base model's name to clients."""
    tokenizer: str
    """Where clients load its tokenizer from."""
    trainer: ModelTrainer
    engine: Engine

    async def start(self) -> None:
        """Take over what a killed service left, and begin to work."""
        self.models, self.samplers = dict[str, Model](), dict[str, Recipient]()
        self.seen: dict[str, float] = defaultdict(time.time)
        """Times of sessions' last requests."""
        self._ready = asyncio.Queue[Model]()
        store.sweep(self.root)
        for path in self.root.glob("sessions/*.json"):
            self.trainer.owners[path.stem] = json.loads(path.read_bytes())["owner"]
        for path in self.root.glob("runs/*/model.json"):
            self._adopt(Model(path.parent))
        for path in self.root.glob("samplers/*/sampler.json"):
            self.sampler(path.parent.name)
        works = self._train(), self.engine.run(), self._tidy()
        self._tasks = [asyncio.create_task(each) for each in works]

    async def close(self) -> None:
        """End; what has no answer is done after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in [*self.trainer.live]:
            await self.trainer.call(self.trainer.leave, model)
        self.trainer.thread.shutdown()

    async def _train(self) -> None:
        while True:
            model, began = await self._ready.get(), time.monotonic()
            while time.monotonic() < began + TURN_S and model.stream.request(model.next):
                self.trainer.waits = True
                async with self.trainer.device:
                    self.trainer.waits = False
                    await self.trainer.call(self.trainer.execute, model)
                model.finished(model.next - 1)
            model.queued = False
            self._look(model)

    def _look(self, model: Model) -> None:
        """Queue a model whose next request has come."""
        if not model.queued and model.stream.request(model.next) is not None:
            model.queued = True
            self._ready.put_nowait(model)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(60)
            for id, sampler in [*self.samplers.items()]:
                if time.time() - self.seen[sampler.session] > FORGET_S:
                    del self.samplers[id]
                    shutil.rmtree(sampler.folder, ignore_errors=True)
            await self.trainer.call(store.sweep, self.root)

    def _adopt(self, model: Model) -> None:
        model.next = model.restarts_after + 1
        while model.stream.answer(model.next) is not None:
            model.next += 1
        self.models[model.id] = model
        self._look(model)

    def require_mine(self, id: str, call: TinkerCall) -> None:
        """Raise Refused unless a session, or what belongs to it, is of the caller's key."""
        session = id.partition(":")[0]
        if self.trainer.owners.get(session) != call.owner:
            raise Refused(f"there is no {id[:80]!r} of this key: create it", status=404)
        self.seen[session] = time.time()

    def create_session(self, call: TinkerCall) -> Json:
        """Begin a session."""
        about, id = call.json | {"owner": call.owner}, uuid.uuid4().hex
        store.write_json(self.root / "sessions" / f"{id}.json", about)
        self.trainer.owners[id] = call.owner
        what = f"{self.model}: adapters are not on the output layer (train_unembed)"
        return {"session_id": id, "info_message": what}

    def model_of(self, id: Any, call: TinkerCall) -> Model:
        """Return a model of the caller's. Raises: Refused."""
        self.require_mine(str(id), call)
        if model := self.models.get(id):
            return model
        raise Refused(f"there is no model {str(id)[:80]!r}: create it", status=404)

    def create_model(self, call: TinkerCall) -> Json:
        """Take the request for a model."""
        asked = call.read(CreateModel)
        about = asked.lora_config.model_dump(exclude={"type", "train_unembed"})
        about |= {"seed": about["seed"] or 0, "loaded": None}
        fits = not about["rank"] or about["train_attn"] or about["train_mlp"]
        demand(fits, "lora_config", "must have train_attn or train_mlp", "set one")
        return self._make(asked, asked.base_model, about, call)

    def load_weights(self, call: TinkerCall) -> Json:
        """Take the request for a model from a saved state, or for a state in a new model."""
        if "session_id" not in call.json:
            return self.train("load_weights", call)
        asked = call.read(LoadModel)
        _, saved = self.trainer.state_of(asked.path, call.owner, "weights")
        about = {name: saved[name] for name in KEPT}
        about |= {"loaded": asked.path, "with_optimizer": asked.optimizer}
        return self._make(asked, asked.base_model or self.model, about, call)

    def _make(self, asked: New, base: str, about: Json, call: TinkerCall) -> Json:
        self.require_mine(asked.session_id, call)
        self._require_base(base)
        id = f"{asked.session_id}:train:{asked.model_seq_id}"
        run = self.root / "runs" / id
        if store.Stream(run).add(0, "create_model", call.body) or id not in self.models:
            about |= {"metadata": asked.user_metadata, "time": store.now()}
            store.write_json(run / Model.file, about)
            self._adopt(Model(run))
        return {"request_id": f"{id}#0", "model_id": id}

    def _require_base(self, name: str) -> None:
        must = f"must be {self.model!r}, but is {name[:200]!r}"
        demand(name == self.model, "base_model", must, "name that, or serve the other")

    def train(self, verb: str, call: TinkerCall) -> Json:
        """Take a request to a model. What is wrong in it fails its future, as later ones wait for
        its number.
        """
        if verb.startswith("forward"):
            head = read_work_message(call.body)
            id, number = head.model_id, head.seq_id
            verb = "forward_only" if head.forward_only or verb == "forward" else verb
        else:
            id, number = (call.json.get(name) for name in ("model_id", "seq_id"))
        model = self.model_of(id, call)
        fits = type(number) is int and 0 < number < model.next + MOST_AHEAD
        demand(fits, "seq_id", "must count requests from 1, in order", "count them")
        if number < model.next and model.stream.answer(number) is None:
            raise Refused(f"the answer to {number} is no longer kept: go on", status=410)
        if model.stream.add(number, verb, call.body):
            self._look(model)
        return {"request_id": f"{model.id}#{number}", "model_id": model.id}

    def create_sampler(self, call: TinkerCall) -> Json:
        """Begin to sample from the base model or from saved weights."""
        asked = call.read(CreateSampler)
        self.require_mine(asked.session_id, call)
        about: Json = {"model_path": asked.model_path}
        if asked.model_path is None:
            self._require_base(asked.base_model or "")
        else:
            _, saved = self.trainer.state_of(asked.model_path, call.owner, "sampler_weights")
            about["seq_id"] = saved["seq_id"]
        id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        store.write_sampler(self.root / "samplers" / id, about)
        return {"sampling_session_id": id}

    def sampler(self, id: str) -> Recipient:
        """Return a sampler, with its open requests under way. Raises: Refused."""
        if found := self.samplers.get(id):
            return found
        folder = self.root / "samplers" / id
        if not (REQUEST.fullmatch(f"{id}#0") and (folder / Recipient.file).exists()):
            raise Refused(f"there is no sampler {id[:80]!r}: create it", status=404)
        self.samplers[id] = made = Recipient(folder)
        for number in (int(path.name) for path in (folder / "requests").glob("[0-9]*")):
            if made.stream.answer(number) is None:
                self.engine.submit(made, number)
        return made

    def sample(self, call: TinkerCall) -> Json:
        """Take a request to sample."""
        asked = call.read(SampleBody)
        self.require_mine(asked.sampling_session_id, call)
        sampler, number = self.sampler(asked.sampling_session_id), asked.seq_id
        if sampler.stream.add(number, "asample", call.body):
            self.engine.submit(sampler, number)
        request = f"{sampler.id}#{number}"
        ids = [f"{request}.{i}" for i in range(asked.num_samples)]
        return {"request_id": request, "sample_sequence_ids": ids}

    async def result(self, call: TinkerCall) -> tuple[str, bytes]:
        """Return the media type and body of a request's answer, or of try_again."""
        request = str(call.json.get("request_id"))
        if not (found := REQUEST.fullmatch(request)):
            raise Refused(f"there is no request {request[:80]!r}", status=404)
        id, number = found[1], int(found[2])
        self.require_mine(id, call)
        of = self.model_of(id, call) if "train" in id else self.sampler(id)
        answer = of.stream.answer(number)
        if answer is None:
            if of.stream.request(number) is None:
                raise Refused(f"request {request} is not kept: send it again", status=410)
            with suppress(TimeoutError):
                await asyncio.wait_for(of.answered[number].wait(), HOLD_S)
            answer = of.stream.answer(number)
        if answer is None:
            state = {"type": "try_again", "request_id": request, "queue_state": "active"}
            if isinstance(of, Model) and number > of.next:
                state["queue_state_reason"] = f"waits for the request with seq_id {of.next}"
            answer = b"J" + json.dumps(state).encode()
        media = "application/x-protobuf" if answer[:1] == b"P" else "application/json"
        return media, answer[1:]
