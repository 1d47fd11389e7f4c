"""What the dialects of the endpoint have in common: a request, its answers, and refusals."""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator

from nemorl.data.templates import Message
from nemorl.rollout.generation import Completion

Json = dict[str, Any]
NAME = re.compile(r"[\w.-]{1,64}")
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_TOOLS, MOST_SAMPLES = 256, 128
TEXT = "text", "input_text", "output_text"
DEPTH = 32
"""Of a tool's schema."""
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda s: (s,) if isinstance(s, str) else () if s is None else s),
]
"""A stop string, several, or none."""


@dataclass(eq=False)
class Refused(Exception):
    """A request that gets an HTTP error, whose message names the field and the remedy."""

    message: str
    _: KW_ONLY
    field: str | None = None
    status: int = 400
    code: str | None = None


def demand(fits: bool, field: str, requirement: str, remedy: str) -> None:
    """Raise Refused unless a field of a request fits."""
    if not fits:
        raise Refused(f"{field} {requirement}: {remedy}", field=field)


class Sampling(BaseModel, extra="forbid"):
    """How a request wants tokens sampled; any other field is refused by its name."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def given(self) -> Json:
        """Return the fields that are given."""
        return self.model_dump(include={*Sampling.model_fields}, exclude_none=True)


class Body(Sampling):
    """Fields of any request."""

    model: str
    stream: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, whatever its dialect."""

    messages: Sequence[Message] = ()
    """Content is text; calls have an `id`, and arguments as a dict."""
    instructed: bool = False
    """Whether the first message is for this request alone, not for those that go on from it."""
    token_ids: Sequence[int] = ()
    """In place of messages."""
    tools: Sequence[Json] = ()
    """As `tool` makes them."""
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    sampling: Json = field(default_factory=dict)
    """The fields of Sampling that were given."""

    def __post_init__(self) -> None:
        demand(bool(self.messages or self.token_ids), "messages", "must not be empty", "add one")
        demand(1 <= self.n <= MOST_SAMPLES, "n", f"must be from 1 to {MOST_SAMPLES}", "lower it")
        fits = len(self.stop) <= MOST_STOPS and all(0 < len(s) <= LONGEST_STOP for s in self.stop)
        must = f"must have at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
        demand(fits, "stop", must, "change them")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One answer to a request."""

    content: str
    calls: Sequence[Json]
    """As in Ask.messages."""
    stop_string: str | None
    prompt_tokens: int
    completion: Completion
    tokenizer: Any = None

    @property
    def tokens(self) -> int:
        return len(self.completion.token_ids)

    @property
    def finish(self) -> str:
        """stop, length or tool_calls."""
        return "tool_calls" if self.calls else self.completion.finish_reason

    @property
    def message(self) -> Json:
        """As a client gives it back."""
        said: Json = {"role": "assistant", "content": self.content}
        return said | {"tool_calls": [*self.calls]} if self.calls else said


Earlier = Mapping[str, Sequence[Message]]
"""The messages up to and with an answer, by its id."""
Event = tuple[str | None, Any]
"""A server-sent event: its name, if the dialect gives it one, and its data."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of client writes requests and reads answers."""

    path: str
    body: type[Body]
    read: Callable[[Any, Earlier], Ask]
    reply: Callable[[Any, Sequence[Sampled]], Json]
    events: Callable[[Any, Json], Iterator[Event]]
    """(body, reply)"""
    failure: Callable[[Refused], Json]


def new_id(prefix: str) -> str:
    """Return an identifier that nobody has had."""
    return f"{prefix}{uuid.uuid4().hex}"


def text_in(content: Any, field: str) -> str:
    """Return content, or its parts of text, as one text. Raises: Refused for images and others."""
    if isinstance(content, str | None):
        return content or ""
    demand(isinstance(content, list), field, "must be text or a list of parts", "send text")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        must, fits = f"must be text, but is of type {kind!r}", kind in TEXT
        fits = fits and isinstance(part.get("text"), str)
        demand(fits, f"{field}.{i}", must, "the model reads text only")
    return "".join(part["text"] for part in content)


def tool(found: Json, place: str, schema_in: str = "parameters") -> Json:
    """Return a tool as chat templates take it. Raises: Refused for a broken schema."""
    name, description, schema = map(found.get, ("name", "description", schema_in))
    named = isinstance(name, str) and bool(NAME.fullmatch(name))
    demand(named, f"{place}.name", "must be 1 to 64 letters, digits, _, . or -", "rename it")
    fits = isinstance(description, str | None)
    demand(fits, f"{place}.description", "must be text", "change it")
    schema = {"type": "object", "properties": {}} if schema is None else schema
    fits = isinstance(schema, dict) and schema.get("type") == "object" and _shallow(schema, DEPTH)
    inner = schema.get("properties", {}) if fits else None
    fits = isinstance(inner, dict) and all(isinstance(each, dict) for each in inner.values())
    must = f"must be a JSON schema of an object, at most {DEPTH} deep"
    demand(fits, f"{place}.{schema_in}", must, "give type, properties and required")
    function = {"name": name, "description": description or "", "parameters": schema}
    return {"type": "function", "function": function}


def _shallow(part: Any, depth: int) -> bool:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return depth > 0 and all(_shallow(each, depth - 1) for each in inner)
