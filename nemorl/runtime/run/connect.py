"""`connect`: runs whose model is at a service."""

import asyncio
import json
import os
from dataclasses import replace
from functools import cached_property
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemorl.checks import refuse_unused, require
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.types import Metrics, Needs, needs_of
from nemorl.models.causal_lm import end_tokens, on_meta
from nemorl.parallel.accumulation import set_step
from nemorl.parallel.backend import ForwardOutput, Output, require_loss_weights
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.measure import of_step
from nemorl.rollout.calls import EventLoop
from nemorl.rollout.generation import Completion, GenerationTraits, SamplingParams, seeded
from nemorl.runtime.run import registry
from nemorl.runtime.run.launch import Config
from nemorl.runtime.serve.agents import INSTALL
from nemorl.runtime.watch.log import changed_settings

OPEN = "trainer.backend", "trainer.device", "lora.rank", "parallel.param_dtype"
CLOSED = (
    *("trainer.", "parallel.", "lora.", "profile.", "model.from_scratch", "optimizer.name"),
    *("optimizer.implementation", "generation.max_batch_size", "generation.stop_strings"),
    *("generation.temperature", "generation.top_", "generation.min_p"),
)
"""Beginnings of settings that a run at a service does not have, but for `OPEN`."""


def connect(config: Config, url: str, *, api_key: str | None = None) -> Config:
    """Return a config whose run trains and samples at `url`, where `nemorl serve --tinker` listens.

    The weights stay there: hf/ is not written, and a checkpoint is the path of a state that the
    service keeps. Losses are here; they may read log-probabilities alone, and the entropy that they
    report is the negative mean of these.

    api_key: None for TINKER_API_KEY. Raises: ConnectionError; ValueError for another key or model.
    """
    closed = (x for x in changed_settings(config) if x.startswith(CLOSED) and x not in OPEN)
    for name in closed:
        must, remedy = "can't be set here for a service", "remove it, or start the service with it"
        require(False, name, must, attrgetter(name)(config), remedy)
    found = register(url, api_key).call("get_server_capabilities", patience=0)["supported_models"]
    path, names = config.model.path, [each["model_name"] for each in found]
    require(
        path in names,
        "model.path",
        f"must be served at {url}, as {', '.join(names)} is",
        path,
        "change it, or serve it",
    )
    return replace(
        config,
        trainer=replace(config.trainer, backend=url, device="cpu"),
        # The service may compute in it: a run compares sampler and trainer.
        parallel=replace(config.parallel, param_dtype=config.parallel.param_dtype or "bfloat16"),
        generation=replace(config.generation, backend=url),
        run=replace(config.run, export=False),
    )


def register(url: str, api_key: str | None = None) -> "ServiceClient":
    """Make a URL the name of a service's backends."""
    service = ServiceClient(url, api_key or os.environ.get("TINKER_API_KEY", ""))
    here: Any = {"service": service}
    registry.register_training_backend(url)(type("Trainer", (ServiceTrainer,), here))
    registry.register_generation_backend(url)(type("Generator", (ServiceGenerator,), here))
    return service


class ServiceClient:
    """Requests to a service, on an event loop of their own."""

    def __init__(self, url: str, key: str) -> None:
        try:
            import httpx

            from nemorl.runtime.serve.tinker import messages
        except ImportError as error:
            raise ValueError(f"a service needs a client ({error}): {INSTALL}") from error
        self.messages, self.tensor = messages.MESSAGES, messages.tensor
        self.url, self.loop = url, EventLoop("nemorl-service")
        self.http = httpx.AsyncClient(
            base_url=f"{url.rstrip('/')}/api/v1",
            headers={"x-api-key": key},
            timeout=60,
            limits=httpx.Limits(max_connections=768),
        )

    async def ask(self, path: str, body: Any = None, patience: int = 600) -> Any:
        """Return what a request leads to: JSON, or bytes. Raises: as `connect`.

        patience: seconds for which the service may be away.
        """
        import httpx

        what, left = path, patience
        while True:
            given: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
            try:
                found = await self.http.request("POST" if body else "GET", path, **given)
            except httpx.TransportError as error:
                found = httpx.Response(503, text=repr(error))
            if found.is_success and "json" not in found.headers["content-type"]:
                return found.content
            answer = found.json() if found.is_success else {"error": found.text}
            if "request_id" in answer:  # its result is there, or will be
                path, body = "retrieve_future", {"request_id": answer["request_id"]}
                left = patience
            elif "error" not in answer:
                return answer
            elif left <= 0 or found.status_code < 500:
                kind = ValueError if found.status_code < 500 else ConnectionError
                raise kind(
                    f"{self.url} must be a URL that nemorl serve --tinker prints, and take {what},"
                    f" but: {answer['error']}"
                )
            else:
                left -= 1
                await asyncio.sleep(1)

    def call(self, *asked: Any, **options: Any) -> Any:
        return self.loop.run(self.ask(*asked, **options))


class ServiceTrainer:
    """Trains a model at a service. A loss gets the log-probabilities of a first pass; its gradient
    by them is the weights of a second, whose gradient is the same.
    """

    service: ServiceClient
    step = 0

    def setup(self, config: BackendConfig) -> None:
        self.config, self._numbers, self._places = config, dict[str, Any](), count()
        self.model = on_meta(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self._session = self.service.call("create_session", {"display_name": "nemorl"})
        self._added = list[tuple[TokenBatch, Tensor]]()

    def _made(self, verb: str, **fields: Any) -> str:
        fields["session_id"] = self._session["session_id"]
        fields["model_seq_id"] = next(self._places)
        return self.service.call(verb, fields)["model_id"]

    def _new(self, rank: int) -> str:
        return self._made(
            "create_model",
            base_model=self.config.model.path,
            lora_config={"rank": rank, "seed": self.config.seed},
        )

    id: Any = cached_property(lambda self: self._new(self.config.lora.rank))
    reference: Any = cached_property(lambda self: self._new(1))  # new adapters change nothing

    def _next(self, id: str, **fields: Any) -> dict[str, Any]:
        return {"model_id": id, "seq_id": next(self._numbers.setdefault(id, count(1))), **fields}

    def _pass(self, id: str, batch: TokenBatch, mask: Tensor, *weights: Tensor) -> Tensor:
        """Return log-probabilities of the tokens in a mask; with weights add a gradient."""
        require(
            batch.logprob_kind == LogprobKind() and batch.target_ids is None,
            "the batch",
            "must be of temperature 1, without filters or targets, at a service",
            batch.logprob_kind,
            "change generation",
        )
        real, data, found = batch.segment_ids > 0, [], b""
        begins = (batch.position_ids[real] == 0).nonzero().flatten().tolist()[1:]
        arrays = batch.input_ids, mask.float(), *weights
        for row in zip(*(np.split(x[real].numpy(), begins) for x in arrays), strict=True):
            named = zip(("target_tokens", "mask", "weights"), row, strict=False)
            inputs = [{"key": k, "value": self.service.tensor(x[1:])} for k, x in named]
            text = {"text": {"tokens": row[0][:-1].astype("<i4").tobytes()}}
            data += [{"chunks": [text], "inputs": inputs}] * (len(row[0]) > 1)
        size = max(1, 2**20 // mask.shape[1])  # in 20 MB
        for i in range(0, len(data), size):
            part = data[i : i + size]
            asked = self._next(id, loss_fn="cross_entropy", data=part, forward_only=not weights)
            sent = self.service.messages["ForwardBackwardRequest"](**asked).SerializeToString()
            answer = self.service.call("forward_backward", sent)
            for each in self.service.messages["ForwardBackwardOutput"].FromString(answer).records:
                found += each.fields[0].value.data
        logprobs, values = torch.zeros(mask.shape), np.frombuffer(found, "<f4").copy()
        logprobs[real & (batch.position_ids > 0)] = torch.from_numpy(values)
        return logprobs

    def forward_backward(
        self, batch: TokenBatch, loss_fn: Any, *, token_logprobs: bool = False
    ) -> Output:
        require_loss_weights(batch)
        needs, mask = needs_of(loss_fn), batch.loss_mask
        name, must = "what a loss reads", "must be log-probabilities alone at a service"
        require(replace(needs, entropy=False) == Needs(), name, must, needs, "change it")
        logprobs = self._pass(self.id, batch, mask)
        leaf, entropy = logprobs.clone().requires_grad_(), (-logprobs).requires_grad_()
        output = loss_fn(ForwardOutput(leaf, entropy if needs.entropy else None), batch)
        gradient, more = torch.autograd.grad(output.loss, (leaf, entropy), allow_unused=True)
        require(more is None, name, must, "the entropy", "set entropy_coef 0")
        self._pass(self.id, batch, mask, -gradient)
        self._added.append((batch, output.loss.detach()))
        return Output(output.metrics, logprobs if token_logprobs else None)

    def optim_step(self, settings: Any = None) -> Metrics:
        taken = set_step(settings, self.config, self.step, ())
        taken["learning_rate"] = lr = taken.pop("lr")
        taken["grad_clip_norm"] = min(taken.pop("max_grad_norm"), 1e30)
        batches, losses = zip(*self._added, strict=True)
        self._added.clear()
        found = self.service.call("optim_step", self._next(self.id, adam_params=taken))
        self.step += 1
        return of_step(batches, sum(losses), torch.tensor(found["metrics"]["grad_norm"]), lr)

    def train_step(self, batch: TokenBatch, loss_fn: Any) -> Metrics:
        return {**self.forward_backward(batch, loss_fn).metrics, **self.optim_step()}

    def get_logprobs(self, batch: TokenBatch) -> Tensor:
        return self._pass(self.id, batch, batch.response_mask)

    def get_reference_logprobs(self, batch: TokenBatch) -> Tensor:
        return self._pass(self.reference, batch, batch.response_mask)

    def save_sampler(self) -> str:
        """Return the id of a sampler of the present weights."""
        asked = self._next(self.id, sampling_session_seq_id=next(self._places))
        return self.service.call("save_weights_for_sampler", asked)["sampling_session_id"]

    def save_checkpoint(self, path: Path) -> None:
        asked = self._next(self.id, path=f"step_{self.step}", overwrite=True)
        saved = self.service.call("save_weights", asked) | {"step": self.step}
        (path / "service.json").write_text(json.dumps(saved))

    def load_checkpoint(self, path: Path) -> None:
        saved = json.loads((path / "service.json").read_bytes())
        self.id = self._made("load_weights", path=saved["path"], optimizer=True)
        self.step = saved["step"]

    def shutdown(self) -> None: ...


class ServiceGenerator:
    """Samples at a service. An answer is by the weights with which it began."""

    service: ServiceClient
    traits = GenerationTraits(shares_model=False, embedded=True)
    sleeps, policy_version = False, 0

    def __init__(self, *, model: Any, tokenizer: Any, precision: str = "float32") -> None:
        self.tokenizer, self._numbers = tokenizer, count()
        self._ends = [*end_tokens(model, tokenizer)]

    def setup(self, config: object) -> None: ...

    async def sample(self, prompt: Any, params: SamplingParams) -> list[Completion]:
        params, version = seeded(params, self.tokenizer), self.policy_version
        refuse_unused(
            "sampling",
            params,
            "is not of the protocol",
            "remove it",
            names=("min_p", "stop_strings"),
        )
        stop = [*params.stop_token_ids, *([] if params.ignore_eos else self._ends)]
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": next(self._numbers),
            "num_samples": params.n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*prompt]}]},
            "sampling_params": {
                "max_tokens": params.max_new_tokens,
                "stop": stop,
                **{k: getattr(params, k) for k in ("temperature", "top_p", "top_k", "seed")},
            },
        }
        work, loop = self.service.ask("asample", body), self.service.loop.loop
        found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
        return [
            Completion(
                token_ids=tuple(ids),
                logprobs=tuple(np.frombuffer(each.logprobs, "<f4").tolist()),
                finish_reason="length" if each.reason else "stop",
                text=self.tokenizer.decode(ids, skip_special_tokens=True),
                policy_versions=(version,) * len(ids),
                tokenizer=self.tokenizer,
            )
            for each in self.service.messages["SampleResponse"].FromString(found).sequences
            for ids in [np.frombuffer(each.tokens, "<i4").tolist()]
        ]

    async def update_weights(self, source: Any, *, in_flight: str = "keep") -> int:
        self._sampler = source.trainer.save_sampler()
        self.policy_version = source.trainer.step
        return self.policy_version

    def shutdown(self) -> None: ...
