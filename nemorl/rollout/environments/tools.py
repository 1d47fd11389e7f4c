"""Tools: public methods of an object that the model calls (TRL's `environment_factory`)."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import Parameter
from types import MethodType
from typing import Any

from nemorl.data.templates import Message
from nemorl.rollout.conversation import ContextFull, ConversationFailed, Outcome, Policy

NOT_TOOLS = ("reset", "get_reward", "close", "check")
"""Public methods that are no tools."""


def tools_of(environment: Any) -> list[Callable[..., Any]]:
    """Return the tools of an object or a class: its public methods, by name."""
    kind = environment if isinstance(environment, type) else type(environment)
    return [
        getattr(environment, name)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


def schemas_of(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools, of their annotations and docstrings' `Args:`."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    names = [tool.__name__ for tool in tools]
    found = []
    for name, tool in zip(names, tools, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"tools must have names of their own, but there are two {name!r}")
        parameters = inspect.signature(tool).parameters
        kinds = {each.kind for each in parameters.values()}
        if kinds & {Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY}:
            raise ValueError(
                f"tool {name!r} must have parameters with names, by which the model gives"
                " them, but has *args or a /: name them"
            )
        try:
            unbound = next(iter(parameters), "") == "self"
            found.append(get_json_schema(MethodType(tool, tool) if unbound else tool))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(
                f"tool {name!r} must have annotated parameters, and a docstring whose"
                f" `Args:` describes each of them ({error}): add them"
            ) from None
    return found


async def use_tools(
    environment: Any,
    messages: list[Message],
    policy: Policy,
    call: Callable[..., Awaitable[Any]],
    most: int,
) -> tuple[list[Message], Outcome]:
    """Have the model call an environment's tools until it answers without a call.

    A call that fails has the error as its result, unless it is a ConversationFailed. Returns the
    messages, of which the last has no text where a limit cut, and an outcome without a reward.
    """
    tools = {tool.__name__: tool for tool in tools_of(environment)}
    schemas = schemas_of(list(tools.values()))
    used = failed = 0
    answer, truncated = None, True
    for _ in range(most):
        try:
            message = await policy.chat(messages, tools=schemas)
        except ContextFull:
            break
        messages = [*messages, message]
        if not (calls := message.get("tool_calls")):
            answer, truncated = message["content"], False
            break
        for each in calls:
            content, good = await _result(each, tools, call)
            used, failed = used + 1, failed + (not good)
            name = each.get("function", {}).get("name", "")
            messages.append({"role": "tool", "name": name, "content": content})
    if truncated:
        messages = [*messages, {"role": "assistant", "content": ""}]
    metrics = {"tool_calls": float(used)}
    if used:
        metrics["tool_errors"] = failed / used
    return messages, Outcome(answer=answer, metrics=metrics, truncated=truncated)


def as_json(found: Any) -> str:
    """Return what a tool returned as text for the model."""
    return json.dumps(
        found,
        ensure_ascii=False,
        default=lambda other: other.tolist() if hasattr(other, "tolist") else str(other),
    )


async def _result(
    asked: Mapping[str, Any],
    tools: Mapping[str, Callable[..., Any]],
    call: Callable[..., Awaitable[Any]],
) -> tuple[str, bool]:
    """Return a call's result as text, and whether it is no error."""
    if asked["type"] == "error":
        return f"Error: {asked['error']}", False
    name, arguments = asked["function"]["name"], asked["function"]["arguments"]
    if name not in tools:
        return f"Error: there is no tool {name!r}; there are {', '.join(tools)}", False
    try:
        inspect.signature(tools[name]).bind(**arguments)
    except TypeError as error:
        return f"Error: {name} can't be called so: {error}", False
    try:
        found = await call(tools[name], **arguments)
        return found if isinstance(found, str) else as_json(found), True
    except ConversationFailed:
        raise
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}", False
