"""How a reward function is called, read from the names of its parameters."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nemorl.data.rows import own_copy

PROMPT = ("prompt", "prompts")
RESPONSE = ("response", "responses", "completion", "completions", "solution_str")
ENVIRONMENT = ("environment", "environments")
"""Parameters that get the environment of tools itself, not a copy."""
PLURAL = ("prompts", "responses", "completions")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Which parameters of a reward function get what."""

    name: str
    batch: bool
    """It takes and returns lists, one entry per response."""
    prompt: str | None
    """The parameter that gets the prompt."""
    response: str | None
    """The parameter that gets the response; None: it judges an environment alone."""
    columns: Mapping[str, bool]
    """The columns that it names; False: the parameter has a default."""
    any_columns: bool
    """It takes `**columns`."""
    settings: Mapping[str, Any]
    """Values that do not come from the data."""
    awaited: bool
    """It is `async`."""

    def arguments(self, prompt: Any, response: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        values = {
            name: value if name in ENVIRONMENT else own_copy(value)
            for name, value in columns.items()
            if name in self.columns or (self.any_columns and name not in (*PROMPT, *RESPONSE))
        } | dict(self.settings)
        if self.response:
            values[self.response] = response
        if self.prompt or self.any_columns:
            values[self.prompt or PROMPT[self.batch]] = prompt
        return values


def read_signature(
    fn: Any,
    *,
    batch: bool | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    there: Collection[str] = (),
) -> Signature:
    """Return the signature of a reward function for rows that have the columns `there`.

    Parameters called `prompt` and `response` (or `completion`, verl's `solution_str`) get those,
    others the setting or else the column of their name. If it names no response, its first
    parameter without a setting or column gets it; if no prompt either, and it has two, these get
    both; none does in a function of an `environment`. Plural names or batch=True make it a function
    of a batch.
    Raises: ValueError for what is not a function or can't take a response.

    >>> read_signature(lambda prompts, responses, answer: [0.0]).batch
    True
    """
    if not callable(fn):
        raise ValueError(
            f"reward must be a function fn(prompt, response), but it is {fn!r}: pass the function"
            " itself"
        )
    name = name or name_of(fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward {name!r} must show its parameters, but {fn!r} has none: wrap it, lambda"
            " prompt, response: ..."
        ) from error
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            shown = f"*{p.name}" if p.kind == p.VAR_POSITIONAL else f"{p.name}, /"
            raise ValueError(
                f"reward {name!r} must take its parameters by name, but it has ({shown}): remove"
                " the * or /; a decorator needs functools.wraps"
            )
    by_place = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
    prompt = next((n for n in PROMPT if n in named), None)
    response = next((n for n in RESPONSE if n in named), None)
    if response is None and not {*ENVIRONMENT} & {*named}:
        free = [n for n in by_place if n != prompt and n not in {*there, *settings}]
        if prompt is None and (len(free) > 1 or len(free) == len(by_place)):
            prompt, *free = free or [PROMPT[0]]
        if not free:
            raise ValueError(
                f"reward {name!r} must take at least (prompt, response), but its parameters are"
                f" {[p.name for p in parameters]}{_columns_among(by_place, there)}: add them"
            )
        response = free[0]
    return Signature(
        name=name,
        batch=bool({*PLURAL, "environments"} & set(named)) if batch is None else batch,
        prompt=prompt,
        response=response,
        columns={
            p.name: p.default is p.empty
            for p in parameters
            if p.name in named and p.name not in (prompt, response, *settings)
        },
        any_columns=any(p.kind == p.VAR_KEYWORD for p in parameters),
        settings={key: value for key, value in settings.items() if key in named},
        awaited=is_async(fn),
    )


def is_async(fn: Any) -> bool:
    """Return whether a function, or the `__call__` of an object, is `async`."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _columns_among(names: Sequence[str], there: Collection[str]) -> str:
    columns = [name for name in names if name in there]
    return f", of which the data has the columns {columns}" if columns else ""


def name_of(fn: Any) -> str:
    """Return a reward's name for metrics and errors."""
    inner = getattr(fn, "func", fn)  # of a functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def columns_of(rows: Sequence[Mapping[str, Any]], signature: Signature) -> dict[str, list[Any]]:
    """Return the rows' columns as lists for a function of a batch; None where a row lacks one."""
    there = dict.fromkeys(name for row in rows for name in row)
    return {
        name: [row.get(name) for row in rows]
        for name in there
        if signature.any_columns or name in signature.columns
    }
