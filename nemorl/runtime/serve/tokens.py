"""vLLM's token form: token ids in, token ids out, as training clients of agents' libraries send."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemorl.data.templates import Message
from nemorl.runtime.serve.chat import failure, stops
from nemorl.runtime.serve.wire import Ask, Body, Dialect, Event, Sampled, Sampling, demand, new_id


class Params(Sampling):
    """vLLM's sampling parameters; the last three change no token."""

    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = False
    routed_experts_prompt_start: int | None = None


class TokensBody(Body):
    """Fields of /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: Params = Params()
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


def read(body: TokensBody, earlier: Mapping[str, Sequence[Message]]) -> Ask:
    """Return a request as an Ask. Raises: Refused."""
    asked = body.sampling_params
    demand(bool(body.token_ids), "token_ids", "must not be empty", "begin with a special token")
    demand(not body.stream, "stream", "must be false", "ask for the whole answer")
    demand((asked.logprobs or 0) <= 1, "logprobs", "must be at most 1", "sampled tokens' are kept")
    return Ask(
        token_ids=body.token_ids,
        n=asked.n,
        stop=stops(asked.stop),
        stop_token_ids=asked.stop_token_ids,
        max_tokens=asked.max_tokens,
        sampling=asked.given(),
    )


def reply(body: TokensBody, ask: Ask, answers: Sequence[Sampled]) -> dict[str, Any]:
    """Return answers with their token ids, end tokens included."""
    choices = []
    for number, answer in enumerate(answers):
        found = answer.completion
        pairs = zip(found.token_ids, found.logprobs, strict=True)
        logprobs = [{"token": f"token_id:{id}", "logprob": value} for id, value in pairs]
        choices.append(
            {
                "index": number,
                "token_ids": list(found.token_ids),
                "finish_reason": found.finish_reason,
                "logprobs": {"content": logprobs},
            }
        )
    return {"request_id": body.request_id or new_id(""), "model": body.model, "choices": choices}


def events(body: TokensBody, found: dict[str, Any]) -> Iterator[Event]:
    """Yield nothing: this form is not streamed."""
    yield from ()


TOKENS = Dialect(
    path="/inference/v1/generate",
    body=TokensBody,
    read=read,
    reply=reply,
    events=events,
    failure=failure,
)
