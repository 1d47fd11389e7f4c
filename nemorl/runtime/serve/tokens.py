"""vLLM's token form: token ids in, token ids out, as training clients of agents' libraries send."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from nemorl.runtime.serve import wire
from nemorl.runtime.serve.chat import failure


class Params(wire.Sampling):
    """vLLM's sampling parameters; the last three change no token."""

    n: int = 1
    stop: wire.Stops = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: PositiveInt | None = None
    logprobs: int | None = Field(default=None, le=1)
    skip_special_tokens: bool = False
    routed_experts_prompt_start: Any = None


class TokensBody(wire.Body):
    """Fields of /inference/v1/generate."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: Params = Params()
    request_id: str | None = None
    cache_salt: Any = None
    priority: Any = None


def read(body: TokensBody, earlier: wire.Earlier) -> wire.Ask:
    """Return a request as an Ask. Raises: Refused."""
    asked = body.sampling_params
    wire.demand(not body.stream, "stream", "must be false", "ask for the whole answer")
    return wire.Ask(
        token_ids=body.token_ids,
        n=asked.n,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        max_tokens=asked.max_tokens,
        sampling=asked.given(),
    )


def reply(body: TokensBody, answers: Sequence[wire.Sampled]) -> wire.Json:
    """Return answers with their token ids, end tokens included."""
    choices = []
    for i, found in enumerate(each.completion for each in answers):
        pairs = zip(found.token_ids, found.logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
        ends = {"finish_reason": found.finish_reason, "logprobs": {"content": content}}
        choices.append({"index": i, "token_ids": found.token_ids, **ends})
    id = body.request_id or wire.new_id("")
    return {"request_id": id, "model": body.model, "choices": choices}


TOKENS = wire.Dialect(
    path="/inference/v1/generate",
    body=TokensBody,
    read=read,
    reply=reply,
    events=lambda body, found: iter(()),  # refused by `read`
    failure=failure,
)
