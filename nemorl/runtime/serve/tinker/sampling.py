"""Samplers: requests of many weights to one engine, in turns."""

import asyncio
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from nemorl.models.source import ModelSource
from nemorl.rollout.calls import blocking
from nemorl.rollout.generation import GenerationBackend, SamplingParams, Weights
from nemorl.rollout.random import derive_seed
from nemorl.runtime.engines.weights import TrainerWeights
from nemorl.runtime.serve.tinker import store
from nemorl.runtime.serve.tinker.messages import MESSAGES, Fields, read_fields, tensor
from nemorl.runtime.serve.tinker.training import ModelTrainer, Recipient, failed
from nemorl.runtime.serve.wire import MOST_SAMPLES, Refused, demand

MOST_TOP = 1 << 26
"""Log-probabilities that a request may ask for."""
EMPTY = -99_999.0
Count = Annotated[int, Field(ge=0)]


class Text(Fields):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class Prompt(Fields):
    chunks: list[Text] = Field(max_length=10_000)


class SampleParams(Fields):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: Count | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Targets(Fields):
    data: list[int]
    dtype: Literal["int64"]
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(Fields):
    """Fields of `asample`."""

    sampling_session_id: str
    seq_id: int = Field(ge=0, lt=10**18)
    prompt: Prompt
    sampling_params: SampleParams
    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: Targets | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=1024)
    record_stability_info: bool | None = None


@dataclass(eq=False)
class Numbered:
    """A trainer under another step, by which engines tell weights apart."""

    step: int
    other: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


@dataclass(kw_only=True)
class Engine:
    """Answers samplers' requests, those of one sampler at a time, on one event loop."""

    generator: GenerationBackend
    trainer: ModelTrainer
    base: str
    """Folder or hub name of the base model."""
    wake: Callable[[], None]
    """Makes room for the engine, and wakes it."""

    def __post_init__(self) -> None:
        self._waiting = defaultdict[Recipient, list[int]](list)
        self._flying = set[asyncio.Task[None]]()
        self._current: Recipient | None = None
        self._given: asyncio.Future[None]
        """Done once the engine has the weights of a round, or an error."""
        self._queue, self._serial = asyncio.Queue[Recipient](), 0

    def submit(self, sampler: Recipient, number: int) -> None:
        """Take a request, whose answer goes to the sampler's stream."""
        goes_on = sampler is self._current and self._flying and not self._waiting
        if goes_on and not self.trainer.waits:
            self._start(sampler, number)
            return
        if sampler not in self._waiting:
            self._queue.put_nowait(sampler)
        self._waiting[sampler].append(number)

    async def run(self) -> None:
        """Answer requests, until it is cancelled."""
        try:
            while sampler := await self._queue.get():
                async with self.trainer.device:
                    await self._round(sampler)
        finally:
            for task in self._flying:
                task.cancel()

    async def _round(self, sampler: Recipient) -> None:
        """Answer what waits for a sampler, and what comes meanwhile while no other has any."""
        self._given = asyncio.ensure_future(self.trainer.call(self._give_weights, sampler))
        await asyncio.wait([self._given])
        for number in self._waiting.pop(sampler):
            self._start(sampler, number)
        while self._flying:
            await asyncio.wait(self._flying)

    def _give_weights(self, sampler: Recipient) -> None:
        self.wake()
        if sampler is self._current:
            return
        self._current, self._serial = None, self._serial + 1
        live: Any = None
        path, folder = sampler.about["model_path"], self.base
        if path is not None:
            saved = store.folder_of(self.trainer.root, path, "sampler_weights")
            there = (store.about_of(saved) or {}).get("seq_id") == sampler.about["seq_id"]
            demand(there, path, "was deleted, or expired", "save again")
            folder = str(saved / "model" if (saved / "model").exists() else saved)
            for model in self.trainer.live:
                if (model.id, model.changes) == (saved.parts[-3], sampler.about.get("changes")):
                    live = Numbered(self._serial, model.backend)
        source: Any = live and TrainerWeights(live)
        source = source or Weights(version=self._serial, tensors=ModelSource(folder))
        blocking(self.generator.update_weights(source))
        self._current = sampler

    def _start(self, sampler: Recipient, number: int) -> None:
        self._flying.add(task := asyncio.create_task(self._answer(sampler, number)))
        task.add_done_callback(self._flying.discard)

    async def _answer(self, sampler: Recipient, number: int) -> None:
        try:
            await self._given
            _, body = sampler.stream.request(number) or ("", b"")
            answer = b"P" + await self._sampled(sampler, read_fields(SampleBody, body))
        except Exception as error:  # the others go on
            answer = failed(error, f"{sampler.id}#{number}")
        sampler.stream.record(number, answer)
        sampler.finished(number)

    async def _sampled(self, sampler: Recipient, ask: SampleBody) -> bytes:
        must = "must be absent: stable_reinforce has no published formula"
        demand(not ask.record_stability_info, "record_stability_info", must, "leave it out")
        prompt = [token for chunk in ask.prompt.chunks for token in chunk.tokens]
        params = self._params(sampler, ask, prompt)
        answer = MESSAGES["SampleResponse"]()
        self.trainer.count("prompt", len(prompt))
        for each in await self.generator.sample(prompt, params):
            self.trainer.count("completion", len(each.token_ids))
            said = answer.sequences.add(
                reason=int(each.finish_reason == "length"),
                tokens=np.array(each.token_ids, "<i4").tobytes(),
                logprobs=np.array(each.logprobs, "<f4").tobytes(),
            )
            if k := ask.topk_sample_logprobs:
                top = await self._top([*prompt, *each.token_ids], k, "topk_sample_logprobs")
                said.top.CopyFrom(_top_message(*(x[len(prompt) :] for x in top)))
        await self._score(answer, ask, prompt, params)
        return answer.SerializeToString()

    def _params(self, sampler: Recipient, ask: SampleBody, prompt: Sequence[int]) -> SamplingParams:
        given, stop, longest = ask.sampling_params, ask.sampling_params.stop, self.trainer.longest
        room, size = longest - len(prompt), self.trainer.vocab_size
        fits = bool(prompt) and 0 <= min(prompt) <= max(prompt) < size
        demand(fits, "prompt", f"must be token ids below {size}", "use this model's tokenizer")
        must = f"must leave room in {longest} tokens, but has {len(prompt)}"
        demand(room > 0, "prompt", must, "cut it")
        stops = [stop] if isinstance(stop, str) else stop or []
        # The same where it is done again.
        usual = derive_seed(zlib.crc32(sampler.id.encode()), ask.seq_id)
        try:
            return SamplingParams(
                n=ask.num_samples,
                seed=(usual if given.seed is None else given.seed) % 2**63,
                temperature=given.temperature,
                top_k=max(given.top_k, 0),
                top_p=given.top_p,
                max_new_tokens=min(given.max_tokens or room, room),
                stop_strings=tuple(each for each in stops if isinstance(each, str)),
                stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
                ignore_eos=stop is not None,
            )
        except ValueError as error:
            raise Refused(f"sampling_params: {error}") from error

    async def _score(
        self, answer: Any, ask: SampleBody, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        """Add what is asked about the prompt's own tokens."""
        skipped = len(prompt) - (ask.prompt_logprobs_last_n or len(prompt) - 1)
        must = "must be below the prompt's length, and given with prompt_logprobs"
        fits = ask.prompt_logprobs_last_n is None or (skipped > 0 and ask.prompt_logprobs)
        demand(bool(fits), "prompt_logprobs_last_n", must, "leave it out")
        if ask.prompt_logprobs:
            scores = await self.generator.score([prompt])
            logprobs = scores.token_logprobs[0].astype("<f4")
            logprobs[:skipped] = math.nan
            answer.prompt_logprobs = logprobs.tobytes()
        if k := ask.topk_prompt_logprobs:
            ids, logprobs = (x.copy() for x in await self._top(prompt, k, "topk_prompt_logprobs"))
            ids[:skipped], logprobs[:skipped] = 0, EMPTY
            answer.top.CopyFrom(_top_message(ids, logprobs))
        targets, k = ask.target_prompt_logprobs, ask.prompt_alt_tokens_k
        if targets is None and not k:
            return
        ids, logprobs = await self._top(prompt, self.trainer.vocab_size, "prompt")

        def add() -> None:
            every = np.empty(logprobs[1:].shape, "<f4")
            np.put_along_axis(every, ids[1:].astype(np.int64), logprobs[1:].astype("<f4"), 1)
            if targets:
                answer.targets.CopyFrom(_targets(targets, every))
            if k:
                heated = torch.tensor(every, dtype=torch.float64) / max(params.temperature, 1e-6)
                draw = torch.Generator().manual_seed(params.seed or 0)
                drawn = heated.softmax(-1).multinomial(k, True, generator=draw).numpy()
                answer.alternatives.tokens.CopyFrom(tensor(drawn))
                found = np.take_along_axis(every, drawn, 1)
                answer.alternatives.logprobs.CopyFrom(tensor(found))

        await asyncio.to_thread(add)

    async def _top(
        self, tokens: Sequence[int], k: int, field: str
    ) -> tuple[np.ndarray, np.ndarray]:
        size, fits = self.trainer.vocab_size, len(tokens) * k <= MOST_TOP
        demand(k <= size, field, f"must be at most the {size} tokens there are", "lower it")
        demand(fits, field, f"must ask for at most {MOST_TOP} log-probabilities", "score less")
        scores = await self.generator.score([tokens], top_k=k)
        return scores.top_ids[0], scores.top_logprobs[0]


def _top_message(ids: np.ndarray, logprobs: np.ndarray) -> Any:
    length, k = ids.shape
    data = {"ids": ids.astype("<i4").tobytes(), "logprobs": logprobs.astype("<f4").tobytes()}
    return MESSAGES["TopK"](k=k, length=length, **data)


def _targets(asked: Targets, every: np.ndarray) -> Any:
    """Return log-probabilities in the layout of the tokens asked for."""
    rows, shape, ids = asked.sparse_crow_indices, asked.shape, np.array(asked.data, np.int64)
    try:
        widths = math.prod(shape[1:]) if rows is None else np.diff(rows)
        place = np.repeat(np.arange(len(every)), widths)
        if shape[:1] != [len(every)] or place.shape != ids.shape:
            raise ValueError(f"{len(ids)} of shape {shape}")
        values = np.where(ids < 0, 0, every[place, ids]).astype("<f4").tobytes()
    except (ValueError, IndexError) as error:
        must = f"must be token ids or -1 of shape [{len(every)}, k]"
        raise Refused(f"target_prompt_logprobs {must} ({error}): correct it") from error
    if rows is None:
        return MESSAGES["Tensor"](dense=values, dtype=1, shape=shape)
    crow, columns = (np.array(x, "<i8").tobytes() for x in (rows, asked.sparse_col_indices))
    csr = {"values": values, "rows": crow, "columns": columns}
    return MESSAGES["Tensor"](csr=csr, dtype=1, shape=shape)
