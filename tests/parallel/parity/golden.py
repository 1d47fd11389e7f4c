"""The golden batch and its models: small, with sizes that not every degree divides."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from nemorl.data.batch import Example, TokenBatch, collate, take
from nemorl.data.comparisons import collate_together
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.masks import token_mean_weights
from tests.tiny_models import tiny_model

VOCAB = 52
SIZES = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
}
"""FSDP2 can't cut 40 or 52 or 8 rows into equal shards at every degree; tp and cp of 2 and 4 divide
what they have to.
"""
LORA_RANK, LORA_ALPHA = 4, 8.0
LENGTHS = (9, 2, 30, 17, 1, 30, 5, 12, 23, 7, 14, 3)
"""Of the golden batch's sequences, in pairs where the loss compares pairs; a lone token has nothing
to predict.
"""
PACKED_ROW = 64
KINDS = {
    "": LogprobKind(),
    "temperature": LogprobKind(temperature=0.7),
    "filtered": LogprobKind(temperature=1.3, top_k=20, top_p=0.9),
    "min-p": LogprobKind(temperature=0.8, top_p=0.95, min_p=0.03),
}
LOSSES = ("policy", "pairs", "nll", "soft")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained on what; no number may depend on plan and layout."""

    model: str = "qwen2"
    tied: bool = True
    layers: int = 3
    loss: str = "policy"
    """policy: token-level clipping, sequence-level clipping, KL and entropy at once; pairs:

    DPO on two sequences of a row; nll: NLL; soft: NLL of soft targets, and what is known of them
    and of the likeliest tokens.
    """
    logprobs: str = ""
    """What the logprobs are of, a name in KINDS."""
    dtype: str = "float32"
    lora: bool = False
    """Whether adapters are trained beside the model, which stays as it is."""
    few: bool = False
    """Only two rows of the batch: less than some plans have ranks, of which the others go through
    padding alone.
    """
    replay: bool = False
    """Whether the batch has experts of most tokens, other than those of the largest logits."""


def make_model(problem: Problem) -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": problem.layers}
    model = tiny_model(problem.model, seed=1, tied=problem.tied, scale=5.0, **sizes)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def draw_experts(length: int, config: Any, generator: torch.Generator) -> torch.Tensor:
    """Of each token, but the last and a fifth of the others, random experts; -1 of these."""
    sizes = length, config.num_hidden_layers, config.num_local_experts
    experts = torch.rand(sizes, generator=generator).argsort(-1)[..., : config.num_experts_per_tok]
    own = torch.rand(length, generator=generator) < 0.2
    own[-1] = True
    return experts.masked_fill(own[:, None, None], -1)


@cache
def golden_batch(problem: Problem) -> TokenBatch:
    """`prev_logprobs` and `reference_logprobs` lie around the model's own, so that some ratios are
    clipped; `generation_logprobs` number the tokens, to find them again.
    """
    from tests.parallel.parity.reference import sequence_logprobs

    generator, prompts = torch.Generator().manual_seed(3), list[torch.Tensor]()
    drawing, drawn = torch.Generator().manual_seed(4), list[torch.Tensor]()
    model, kind, examples = make_model(problem), KINDS[problem.logprobs], []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        prompt = max(1, length // 3)
        if i % 3 and prompts[-1].numel() < length:  # up to three sequences begin alike
            prompt = prompts[-1].numel()
            ids[:prompt] = prompts[-1]
        experts = draw_experts(length, model.config, drawing) if problem.replay else None
        if experts is not None:
            if i % 3 and prompts[-1].numel() < length:
                experts[:prompt] = drawn[-1]
            drawn.append(experts[:prompt])
        prompts.append(ids[:prompt])
        trained = (torch.arange(length) >= prompt) & (torch.rand(length, generator=generator) < 0.9)
        with torch.no_grad():
            now = sequence_logprobs(model, ids, kind, experts)[0]
        near = [now + scale * torch.randn(length, generator=generator) for scale in (0.15, 0.3)]
        columns: dict[str, Any] = {
            "prev_logprobs": near[0].tolist(),
            "reference_logprobs": near[1].tolist(),
            "advantages": [1.0 if i % 3 else -1.5] * length,
        }
        columns["generation_logprobs"] = (1000.0 * i + torch.arange(length)).tolist()
        if problem.loss == "soft":
            columns["target_ids"] = torch.randint(0, VOCAB, (length, 3), generator=drawing)
            weights = torch.rand(length, 2, generator=drawing).softmax(-1)
            columns["target_weights"] = torch.nn.functional.pad(weights, (0, 1))
        response = (torch.arange(length) >= prompt).tolist()
        examples.append(
            Example(
                input_ids=ids.tolist(),
                loss_mask=trained.tolist(),
                response_mask=response,
                routed_experts=experts,
                **columns,
            )
        )
    together = list(zip(examples[0::2], examples[1::2], strict=True))
    batch = collate_together(together) if problem.loss == "pairs" else collate(examples)
    batch = take(batch, range(2, 4)) if problem.few else batch
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask), logprob_kind=kind)
