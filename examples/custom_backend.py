"""An engine of your own, chosen by its name: `generation.backend`. Here transformers' `generate`,
one request at a time. `Scheduler` keeps the requests; a server needs only `async def sample`.

    python examples/custom_backend.py        a small demonstration

`nemorl.GenerationBackend` says what each method must do;
tests/rollout/test_generation_conformance.py tests every engine: run it on yours.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import nemorl
import torch
from nemorl.models.causal_lm import end_tokens
from nemorl.models.source import ModelSource
from nemorl.rollout.generation import (
    Completion,
    SamplingParams,
    WeightSource,
    checked_requests,
    text_before,
)
from nemorl.rollout.random import derive_seed
from nemorl.rollout.scheduler import Request, Scheduler
from nemorl.rollout.torch_backend import copy_weights


@nemorl.register_generation_backend("transformers")
class TransformersBackend:
    """Computes with the trainer's live model. Not for LoRA."""

    def __init__(self, *, model, tokenizer=None, precision: str = "float32") -> None:
        self.model = ModelSource.of(model).load()
        self.tokenizer, self.precision = tokenizer, precision
        self.waiting: list[Request] = []
        self.scheduler = Scheduler(self._step)

    @property
    def policy_version(self) -> int | None:
        return self.scheduler.policy_version

    def setup(self, config: nemorl.GenerationConfig) -> None: ...  # start an engine here

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.scheduler.check()
        return await self.scheduler.sample(*self._requests([prompt], params))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        self.scheduler.check()
        return self.scheduler.generate(self._requests(prompts, sampling_params))

    def _requests(self, prompts, sampling_params) -> list[Request]:
        sizes = {
            "vocab_size": self.model.config.vocab_size,
            "max_positions": self.model.config.max_position_embeddings,
        }
        params = checked_requests(prompts, sampling_params, **sizes)
        return [Request(*one) for one in zip(prompts, params, strict=True)]

    def _step(self, new: list[Request], dropped: list[Request]) -> None:
        """Answer one of the requests that wait."""
        self.waiting = [one for one in self.waiting + new if one not in dropped]
        if not self.waiting:
            return
        request, training = self.waiting.pop(0), self.model.training
        self.model.eval()
        bfloat16 = torch.autocast(
            self.model.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"
        )
        try:
            with torch.random.fork_rng(), bfloat16:
                # A request draws from its own seed, and leaves the trainer's generator alone.
                request.answer(self._answer(list(request.prompt), request.params))
        except BaseException:
            self.waiting = []  # all requests get this error
            raise
        finally:
            self.model.train(training)

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        torch.manual_seed(torch.seed() if params.seed is None else derive_seed(params.seed))
        sampling = {"do_sample": False}
        if params.temperature:
            sampling = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
            }
        ids = torch.tensor([prompt] * params.n, device=self.model.device)
        ends, room = self._ends(params), self.model.config.max_position_embeddings - len(prompt)

        def ended(tokens: list[int]) -> bool:
            return tokens[-1] in ends or any(
                stop in self._text(tokens) for stop in params.stop_strings
            )

        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(params.max_new_tokens, room),
            pad_token_id=0,
            eos_token_id=list(ends) or None,
            return_dict_in_generate=True,
            output_scores=True,
            stopping_criteria=[
                lambda rows, scores, **_: torch.tensor(
                    [ended(row[len(prompt) :].tolist()) for row in rows]
                )
            ],
            **sampling,
        )
        scores = torch.stack(output.scores, dim=1).float()
        if scores.isnan().any():
            raise FloatingPointError(
                "the model's logits are not finite, so that no token can be sampled: its weights"
                " hold NaN or infinity"
            )
        completions = []
        for tokens, of_row in zip(
            output.sequences[:, len(prompt) :].tolist(), scores.log_softmax(-1), strict=True
        ):
            length = next(
                (k for k in range(1, len(tokens) + 1) if ended(tokens[:k])), len(tokens)
            )  # then padding
            logprobs = of_row[range(length), tokens[:length]].tolist()
            text = self._text(tokens[:length]) if self.tokenizer else ""
            reason = "stop" if ended(tokens[:length]) else "length"
            completions.append(
                Completion(
                    token_ids=tuple(tokens[:length]),
                    logprobs=tuple(logprobs),
                    finish_reason=reason,
                    text=text_before(params.stop_strings, text),
                    policy_versions=(self.policy_version,) * length,
                    tokenizer=self.tokenizer,
                )
            )
        return completions

    def _ends(self, params: SamplingParams) -> set[int]:
        ends = () if params.ignore_eos else end_tokens(self.model, self.tokenizer)
        return {*ends, *params.stop_token_ids}

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    async def update_weights(self, source: WeightSource, *, in_flight: str = "keep") -> int:
        version, weights = source.newest()
        with self.scheduler.updating(version, in_flight):
            copy_weights(self.model, weights, version)
        return version

    def sleep(self) -> None:
        with self.scheduler.lock:  # not in the middle of a request
            self.scheduler.asleep = True

    def wake(self) -> None:
        self.scheduler.asleep = False

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.waiting, self.model = [], None


def demonstrate(folder: Path, steps: int = 20) -> None:
    """A model that knows nothing learns to answer in even digits."""
    from quickstart import save_model, save_tokenizer

    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    result = nemorl.train(
        model=folder / "model",
        dataset=[{"prompt": f"{number}="} for number in range(100)],
        reward_fn=lambda response: sum(character in "02468" for character in response) / 4,
        generation={"backend": "transformers", "max_new_tokens": 4},
        dir=str(folder / "run"),
        lr=1e-3,
        num_prompts_per_step=8,
        num_generations_per_prompt=8,
        max_num_steps=steps,
        display="plain",
    )
    first, last = (
        line for line in result.history if line["step"] in (1, steps) and line["phase"] == "train"
    )
    print(f"reward: {first['reward']:.2f} -> {last['reward']:.2f}")
    print(
        "what engine and trainer say of a token differs by a factor of"
        f" {last['token_mult_prob_error']:.6f} on average"
    )


if __name__ == "__main__":
    demonstrate(Path("runs/custom_backend"), *map(int, sys.argv[1:2]))
