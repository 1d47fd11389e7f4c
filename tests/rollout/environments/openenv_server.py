"""A server of OpenEnv, of its own classes: `python openenv_server.py PORT SESSIONS`."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    text: str


class Heard(Observation):
    text: str = ""


class Echo(Environment):
    """Repeats what it hears, three times; the rewards are the numbers of the turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    opened = closed = 0

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        Echo.opened += 1

    def reset(self, seed=None, episode_id=None, answer: str = "") -> Heard:
        self._state = State(step_count=0)
        self.answer = answer
        return Heard(text=f"{answer}+")

    def step(self, action: Say, timeout_s=None) -> Heard:
        if action.text == "fail":
            raise KeyError("lost")
        count = self._state.step_count = self._state.step_count + 1
        reward = float(count) if count > 1 else None
        return Heard(text=f"{self.answer}{count}", reward=reward, done=count == 3)

    def close(self) -> None:
        Echo.closed += 1

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=sessions)
    app.add_api_route("/count", lambda: [Echo.opened, Echo.closed])
    uvicorn.run(app, port=port, log_level="warning")
