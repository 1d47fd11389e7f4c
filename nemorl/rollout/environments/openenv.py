"""Environments behind a URL: servers of OpenEnv."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from nemorl.rollout.environments.classes import TurnResult
from nemorl.rollout.environments.tools import as_json

Observation = Mapping[str, Any]


def openenv(
    url: str,
    *,
    act: Callable[[str], Mapping[str, Any]],
    show: Callable[[Observation], str] = as_json,
) -> "Callable[[], OpenEnv]":
    """Return an environment on a server of OpenEnv, with a session for each conversation.

    url: of the server. act: makes an action of a response. show: makes the text that the model is
    told of an observation. The server's `reset` gets the row's columns.

    >>> echo = openenv("http://localhost:8000", act=lambda response: {"message": response})
    """
    address = url.rstrip("/").replace("http", "ws", 1) + "/ws"

    def server() -> OpenEnv:
        return OpenEnv(address, act, show)

    server.__name__ = f"openenv {url}"
    return server


class OpenEnv:
    """A session with a server of OpenEnv."""

    def __init__(self, address: str, act: Callable[..., Any], show: Callable[..., str]) -> None:
        self._address, self._act, self._show = address, act, show
        self._socket: Any = None

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # then the server has said why
            await self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
        answer = json.loads(await self._socket.recv())
        if answer["type"] == "error":
            hint = ": start it with more max_concurrent_envs" * ("CAPACITY" in str(answer["data"]))
            raise RuntimeError(f"{self._address} refused {kind}: {answer['data']}{hint}")
        return answer["data"]

    async def reset(self, **columns: Any) -> str:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise ImportError("openenv needs websockets: pip install websockets") from error
        size = 100 * 2**20  # as in OpenEnv's own client
        self._socket = await connect(self._address, max_size=size, ping_interval=None)
        return self._show((await self._ask("reset", columns))["observation"])

    async def step(self, response: str) -> TurnResult:
        found = await self._ask("step", self._act(response))
        return TurnResult(
            observation=self._show(found["observation"]),
            reward=float(found["reward"] or 0.0),
            done=found["done"],
        )

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):  # the server may be gone
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.wait_closed()
