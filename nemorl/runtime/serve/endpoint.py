"""The HTTP server: routes, keys, limits of what clients may do, and what is counted."""

import asyncio
import hashlib
import json
import os
import resource
import secrets
import socket
import time
from collections import Counter as Waiting
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from nemorl.checks import short
from nemorl.rollout.calls import EventLoop
from nemorl.runtime.serve import chat, messages, responses, tokens
from nemorl.runtime.serve.session import Session
from nemorl.runtime.serve.wire import Ask, Dialect, Event, Json, Refused, Sampled

T = TypeVar("T")
CHAT, RESPONSES, MESSAGES = chat.CHAT, responses.RESPONSES, messages.MESSAGES
DIALECTS = CHAT, RESPONSES, MESSAGES, tokens.TOKENS
MOST_BYTES = 32 << 20
"""Of a request's body."""
SILENT_S = 30.0
"""Longest wait for a whole request, and for a client that reads no answer."""
END_S = 10.0
"""Longest wait for open requests, once the server ends."""
FILES = 65_536
WHYS = {
    "extra_forbidden": "is not a field of this request: leave it out",
    "missing": "is missing: give it",
}
Role = Literal["chat", "train", "read"]
Handler = Callable[[str, Request, bytes], Awaitable[Response]]
"""handler(name of the key, request, body)"""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Who may do what: `chat` asks the model, `train` is for `routes`, `read` sees the model's name
    and the metrics.
    """

    name: str
    role: Role
    session: Session | None = None


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """Closes where no whole request comes, or no answer is read, for SILENT_S."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {"transport": transport}
        self._seen: Any = None
        self._loop = asyncio.get_running_loop()
        self._watch = self._loop.call_later(SILENT_S, self._look)
        self._unread: asyncio.TimerHandle | None = None

    def _look(self) -> None:
        cycle = self.cycle  # the latest request: still the one of the last look?
        if cycle is self._seen and (cycle is None or cycle.response_complete):
            self.transport.close()
            return
        self._seen = cycle
        self._watch = self._loop.call_later(SILENT_S, self._look)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._loop.call_later(SILENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for timer in filter(None, (self._watch, self._unread)):
            timer.cancel()


class Traffic:
    """What is counted, under Prometheus' names."""

    def __init__(self) -> None:
        self.registry = to = CollectorRegistry()
        self.requests = Counter("nemorl_requests", "Requests", ["path", "status"], registry=to)
        self.tokens = Counter("nemorl_tokens", "Tokens of answers", ["kind"], registry=to)
        self.open = Gauge("nemorl_open_requests", "Requests that wait for an answer", registry=to)
        self.seconds = Histogram("nemorl_seconds", "Seconds until an answer", registry=to)

    def totals(self) -> dict[str, float]:
        """Return how many requests and tokens there were."""
        names = "open", "answered", "refused", "prompt tokens", "completion tokens"
        found = dict.fromkeys(names, 0.0)
        for each in chain.from_iterable(metric.samples for metric in self.registry.collect()):
            match each.name, each.labels:
                case "nemorl_open_requests", _:
                    found["open"] = each.value
                case "nemorl_requests_total", {"status": status}:
                    found["answered" if status < "400" else "refused"] += each.value
                case "nemorl_tokens_total", {"kind": kind}:
                    found[f"{kind} tokens"] = found.get(f"{kind} tokens", 0.0) + each.value
        return found


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """Serves sessions over HTTP, from a thread of its own, until `close`."""

    host: str = "127.0.0.1"
    port: int = 0
    keys: dict[str, Key] = field(default_factory=dict)
    """By the key itself. A session has its own, which ends with it."""
    audit: str | None = None
    """A file that gets a line of JSON for each request."""
    tls: tuple[str | None, str | None] = (None, None)
    """Files of the certificate and its key."""
    loads: bool = False
    """Whether its keys are still to come."""
    routes: Sequence[tuple[str, str, Handler]] = ()
    """Method, path and handler of others, for keys that may train."""

    def __post_init__(self) -> None:
        self.traffic, self._sessions = Traffic(), dict[str, Session]()
        self._waiting = Waiting[asyncio.Task[list[Sampled]]]()
        """Clients of each answer: retries wait for the same."""
        self._log = Path(self.audit or os.devnull).open("a", buffering=1)  # noqa: SIM115
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, proto=socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            must = f"host and port must be free, but {self.host}:{self.port} is not ({error})"
            raise ValueError(f"{must}: choose others (--port)") from error
        self.port = listener.getsockname()[1]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(soft, min(hard, FILES)) if hard > 0 else FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        certificate, key = self.tls
        config = uvicorn.Config(
            self._app(),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=max(most // 2, most - 512),
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(END_S),
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = uvicorn.Server(config)
        self._loop = EventLoop("nemorl-endpoint")
        served = self._server.serve(sockets=[listener])
        self._ended: Future[None] = asyncio.run_coroutine_threadsafe(served, self._loop.loop)
        while not self._server.started:
            if self._ended.done():
                self._ended.result()
            time.sleep(0.005)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * bool(self.tls[0])}://{host}:{self.port}"

    @asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Give the base URL and the key of a session, which end with the block."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        try:
            yield f"{self.url}/s/{key}/v1", key
        finally:
            del self._sessions[key]
            session.close()
            idle = asyncio.run_coroutine_threadsafe(self._idle(session), self._loop.loop)
            await asyncio.wrap_future(idle)  # what nobody has seen is taken back

    async def _idle(self, session: Session) -> None:
        while session.busy:
            await asyncio.sleep(0.001)

    @contextmanager
    def gate(self) -> Iterator[tuple[int, int]]:
        """Give a socket that takes a listener of a sandbox, to serve it, and its port."""
        ours, theirs = socket.socketpair()
        served = asyncio.run_coroutine_threadsafe(self._serve_sent(ours), self._loop.loop)
        with theirs:
            try:
                yield theirs.fileno(), self.port
            finally:
                served.cancel()

    async def _serve_sent(self, ours: socket.socket) -> None:
        ours.settimeout(SILENT_S)
        with ours:
            _, sent, *_ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
        listener = socket.socket(fileno=sent[0])
        protocol = partial(Connection, self._server.config, self._server.server_state, {})
        async with await self._loop.loop.create_server(protocol, sock=listener) as server:
            await server.serve_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine on the server's loop."""
        return self._loop.run(work)

    def close(self) -> None:
        """End after open requests, END_S at most. May be repeated."""
        self._server.should_exit = True
        self._ended.result()
        self._loop.close()
        self._log.close()

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        routes: list[tuple[str, Dialect, Role, Any]] = [
            *((each.path, each, "chat", partial(self._answer, each)) for each in DIALECTS),
            ("/v1/messages/count_tokens", MESSAGES, "chat", self._count_tokens),
            ("/v1/models", CHAT, "read", self._models),
            ("/metrics", CHAT, "read", self._metrics),
        ]
        for path, dialect, role, work in routes:
            handle = partial(self._handle, dialect.failure, role, work)
            for start in ("", "/s/{key}"):
                app.add_route(start + path, handle, ["GET" if role == "read" else "POST"])
        for method, path, handler in self.routes:
            handle = partial(self._handle, _detail, "train", partial(self._routed, handler))
            app.add_route(path, handle, [method])
        app.add_route("/health", self._health)
        app.add_exception_handler(HTTPException, _no_route)
        return app

    async def _handle(
        self, failure: Callable[[Refused], Json], role: Role, work: Any, request: Request
    ) -> Response:
        began, refused, response = time.monotonic(), None, Response(status_code=499)
        note = request.state.note = {"key": None, "prompt_tokens": 0, "completion_tokens": 0}
        self.traffic.open.inc()
        try:
            response = await work(self._session(request, role), request)
        except Refused as error:
            refused = error
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            refused = Refused("it has ended", status=503)
        except Exception as error:
            refused = Refused(f"the policy could not answer: {error!r}", status=500)
        if refused:
            response = JSONResponse(failure(refused), refused.status)
        self.traffic.open.dec()
        seconds, path = time.monotonic() - began, request.scope["route"].path
        self.traffic.requests.labels(path, str(response.status_code)).inc()
        self.traffic.seconds.observe(seconds)
        for kind in ("prompt", "completion"):
            self.traffic.tokens.labels(kind).inc(note[f"{kind}_tokens"])
        line = {
            "time": datetime.now(UTC).isoformat(),
            "client": request.client and request.client.host,
            "path": path,
            "status": response.status_code,
            "seconds": round(seconds, 4),
            **note,
        }
        self._log.write(json.dumps(line) + "\n")
        return response

    def _session(self, request: Request, role: Role) -> Session | None:
        header = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        given = request.path_params.get("key", header.removeprefix("Bearer ").strip())
        if session := self._sessions.get(given):
            request.state.note["key"] = "session"
            return session
        known = (key for key in self.keys if secrets.compare_digest(key.encode(), given.encode()))
        found = self.keys.get(next(known, ""))
        if found is None:
            if self.loads:
                raise Refused("the model is being loaded: ask again", status=503)
            must = "the key must be that of an open conversation, or one that the server knows"
            raise Refused(f"{must}: it is wrong, or its conversation is over", status=401)
        request.state.note["key"] = found.name
        if role not in ("read", found.role):
            must = f"the key {found.name} may {found.role}, but not {role}"
            raise Refused(f"{must}: use another", status=403)
        return found.session

    async def _answer(self, dialect: Dialect, session: Session, request: Request) -> Response:
        raw = await _read(request)
        body, ask = _asked(dialect, session, raw)
        answers = await self._answers(session, ask, request, raw)
        found = dialect.reply(body, answers)
        if dialect is RESPONSES:
            session.keep(found["id"], ask, answers[0])
        note = request.state.note
        note["prompt_tokens"] = answers[0].prompt_tokens
        note["completion_tokens"] = sum(each.tokens for each in answers)
        if not body.stream:
            return JSONResponse(found)
        lines = [_sse(each) for each in dialect.events(body, found)]
        return Response("".join(lines), media_type="text/event-stream")

    async def _answers(
        self, session: Session, ask: Ask, request: Request, raw: bytes
    ) -> list[Sampled]:
        """Return the answers to a request, or of the one of which it is a retry."""
        named = request.headers.get("idempotency-key")
        again = named or request.headers.get("x-stainless-retry-count", "0") != "0"
        key = request.url.path, named or hashlib.sha256(raw).hexdigest()
        task = session.asked.get(key) if again else None
        if task is None:
            task = asyncio.create_task(session.submit(partial(session.answer, ask)))
            session.ask(key, task)
        self._waiting[task] += 1
        session.busy += 1
        gone, lost = asyncio.create_task(_gone(request)), True
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            lost = gone.done() or request.state.transport.is_closing()
            if not lost:
                return task.result()
            raise ClientDisconnect
        finally:
            session.busy -= 1
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                if lost:
                    session.abandon(key, task)
            gone.cancel()

    async def _routed(self, handler: Handler, session: Any, request: Request) -> Response:
        return await handler(request.state.note["key"], request, await _read(request))

    async def _count_tokens(self, session: Session, request: Request) -> Response:
        _, ask = _asked(MESSAGES, session, await _read(request))
        return JSONResponse({"input_tokens": await session.submit(partial(session.count, ask))})

    async def _models(self, session: Session | None, request: Request) -> Response:
        sessions = (session, *(each.session for each in self.keys.values()))
        models = {each.model: each.longest for each in sessions if each}
        made = {"object": "model", "created": 0, "owned_by": "nemorl"}
        cards = [{"id": id, "max_model_len": most, **made} for id, most in models.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def _health(self, request: Request) -> Response:
        ready = bool(self.keys or self._sessions)
        return JSONResponse({"status": "ok" if ready else "loading"}, 200 if ready else 503)

    async def _metrics(self, session: Session | None, request: Request) -> Response:
        return Response(generate_latest(self.traffic.registry), media_type="text/plain")


def _detail(refused: Refused) -> Json:
    return {"detail": refused.message}


endpoint = cache(Endpoint)
"""Return the server of this process, where agents find their conversations."""


async def _no_route(request: Request, error: Any) -> Response:
    paths = ", ".join([*(each.path for each in DIALECTS), "with --tinker /api/v1/…"])
    text = f"{request.method} {request.url.path} is unknown: the paths are {paths}"
    return JSONResponse(CHAT.failure(Refused(text)), error.status_code)


async def _read(request: Request) -> bytes:
    """Return a request's body. Raises: Refused for one that is too large or too slow."""
    found, size = bytearray(), int(request.headers.get("content-length", 0))
    parts = request.stream()
    try:
        async with asyncio.timeout(SILENT_S):
            while size <= MOST_BYTES and (part := await anext(parts)):
                found += part
                size = max(size, len(found))
    except TimeoutError:
        must = f"the body must come within {SILENT_S:g} s"
        raise Refused(f"{must}: send it at once", status=408) from None
    if size > MOST_BYTES:
        raise Refused(f"the body must be at most {MOST_BYTES >> 20} MB: send less", status=413)
    return bytes(found)


def _asked(dialect: Dialect, session: Session, raw: bytes) -> tuple[Any, Ask]:
    try:
        body = dialect.body.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        why = WHYS.get(first["type"])
        why = why or f"is wrong: {first['msg']}, but is {short(first['input'])}"
        raise Refused(f"{field} {why}", field=field) from None
    if body.model != session.model:
        must = f"model must be {session.model!r}, but is {body.model[:200]!r}"
        raise Refused(f"{must}: correct it", field="model", status=404, code="model_not_found")
    return body, dialect.read(body, session.earlier)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sse(event: Event) -> str:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\n" * bool(name) + f"data: {text}\n\n"
