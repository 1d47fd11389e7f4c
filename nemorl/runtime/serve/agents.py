"""Agents as environments: `agent`, and what `led_by` finds in settings."""

import asyncio
import inspect
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from nemorl.checks import as_number, require
from nemorl.rollout.answers import GIVEN
from nemorl.rollout.calls import Call, call_limited, name_of
from nemorl.rollout.cohort import Cohort
from nemorl.rollout.config import RolloutConfig
from nemorl.rollout.conversation import ConversationFailed, Episode, Outcome
from nemorl.rollout.environments.tools import as_json
from nemorl.rollout.processes import kill_tree
from nemorl.rollout.sandbox import AGENT_ENVIRONMENT, agent_in_sandbox, check_sandbox
from nemorl.rollout.user_code import function_of

QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
"""Else openai-agents sends what is said to its maker."""
SHOWN = 2_000
"""Characters of what a command printed, in errors."""


def agent(run: Callable[..., Any]) -> "Agent":
    """Return an agent as an environment: it leads a conversation through a URL of the policy.

    run: `async def run(row, base_url, api_key) -> float | Outcome`, its reward. A plain function
    is called in one of 64 threads. `base_url` takes OpenAI's chat completions and responses, and,
    without its /v1, Anthropic's messages; the model is called "policy". All that it samples there
    is recorded and trained on, each answer as the engine made it.

    An agent that raises, or takes longer than `rollout.timeout_s` between two answers, fails alone;
    where a limit has cut its last answer, or its turns, the conversation's reward is 0.

    >>> async def run(row, base_url, api_key):
    ...     client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    ...     asked = [{"role": "user", "content": row["question"]}]
    ...     found = await client.chat.completions.create(model="policy", messages=asked)
    ...     return float(row["answer"] in found.choices[0].message.content)
    >>> agent(run).name
    'run'
    """
    return Agent(run)


@dataclass(frozen=True)
class Agent:
    """An agent that leads conversations (`agent`)."""

    run: Callable[..., Any]
    reads: ClassVar = ("max_turns",)

    def __post_init__(self) -> None:
        must = "must be a function run(row, base_url, api_key)"
        require(_is_agent(self.run), "agent", must, self.run, "name its parameters so")
        try:
            import nemorl.runtime.serve.endpoint as _  # noqa: F401
        except ImportError as error:
            raise ValueError(f"an agent needs a server ({error}): {INSTALL}") from error

    @property
    def name(self) -> str:
        return name_of(self.run)

    def episode(self, cohort: Cohort) -> Episode:
        """Return the episode of one conversation."""
        from nemorl.runtime.serve.endpoint import endpoint
        from nemorl.runtime.serve.session import Session

        limits, tokenizer = cohort.limits, cohort.prompts.tokenizer
        name, template = f"agent {self.name!r}", getattr(tokenizer, "chat_template", None)
        must, remedy = "needs a chat template", "add --model.chat-template (passthrough)"
        require(template is not None, name, must, None, remedy)
        free = cohort.free if isinstance(self.run, CommandAgent) else nullcontext()

        async def episode(row: Mapping[str, Any], policy: Any) -> Outcome:
            policy.call = Call(name, limits.timeout_s)
            session = Session(
                policy, tokenizer, longest=limits.max_tokens, max_turns=limits.max_turns
            )
            async with free, endpoint().open(session) as (url, key):
                try:
                    found = await call_limited(
                        policy.call, cohort.free, self.run, row, base_url=url, api_key=key
                    )
                except Exception:
                    if policy.full:
                        raise policy.full from None
                    last = policy.turns[-1:]
                    if session.cut or any(turn.completion.truncated for turn in last):
                        return Outcome(truncated=True)
                    raise
            if not policy.turns:
                raise ConversationFailed(f"{name} must ask the policy, but did not: use base_url")
            if isinstance(found, Outcome):
                return found
            must = "must return a reward, as a number or an Outcome"
            require(as_number(found) == as_number(found), name, must, found, "return 0.0")
            return Outcome(reward=as_number(found))

        return episode


INSTALL = "pip install 'nemorl[serve]'"


def _is_agent(found: Any) -> bool:
    try:
        return callable(found) and {"base_url", "api_key"} <= {*inspect.signature(found).parameters}
    except (ValueError, TypeError):
        return False


@dataclass(frozen=True)
class CommandAgent:
    """A command for each conversation, as an agent's `run`."""

    command: str
    sandbox: bool = False

    def __post_init__(self) -> None:
        if self.sandbox:
            check_sandbox()
            agent_in_sandbox(shlex.split(self.command), (0, 0))

    @property
    def __name__(self) -> str:
        return self.command

    async def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Run the command with the row on its standard input; return the last line that it prints.

        Raises: ConversationFailed where it fails, or prints no number.
        """
        from nemorl.runtime.serve.endpoint import endpoint

        words, file = shlex.split(self.command), tempfile.TemporaryFile
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        env = {**QUIET, **(AGENT_ENVIRONMENT if self.sandbox else os.environ)}
        env |= {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
        place: Any = endpoint().gate() if self.sandbox else nullcontext(())
        with place as gate, file() as out, file() as err:
            process = await asyncio.create_subprocess_exec(
                *(agent_in_sandbox(words, gate) if gate else words),
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=env | dict.fromkeys(keys, api_key),
                pass_fds=gate[:1],
                start_new_session=True,
            )
            try:
                await process.communicate(as_json(dict(row)).encode() + b"\n")
            finally:
                kill_tree(process.pid)
            said, errors = (_end_of(file) for file in (out, err))
        try:
            if process.returncode == 0:
                return float(said.rpartition("\n")[2])
            how = f"ended with {process.returncode}"
        except ValueError:
            how = "must print a reward in its last line, but did not"
        raise ConversationFailed(f"{self.command!r} {how}: {errors or said or 'nothing'}")


def _end_of(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN))
    return file.read().decode(errors="replace").strip()


def led_by(environment: Any, rollout: RolloutConfig) -> Any:
    """Return the given environment, or the settings', with agents made of its functions that take
    `base_url` and `api_key`.
    """
    if rollout.agent is not None:
        alone, must = environment is None, "must be left out beside rollout.agent"
        require(alone, "environment", must, environment, "remove one of them")
        return Agent(CommandAgent(rollout.agent, sandbox=rollout.sandbox))
    given = rollout.environment if environment is None else environment
    if isinstance(given, Mapping):
        return {name: _led(each) for name, each in given.items()}
    return _led(given)


def _led(given: Any) -> Any:
    named = isinstance(given, str) and ":" in given and not given.startswith(GIVEN)
    found = function_of(given, "rollout.environment") if named else given
    return Agent(found) if inspect.isroutine(found) and _is_agent(found) else given
