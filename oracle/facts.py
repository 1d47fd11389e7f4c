"""What no row can show: gradients in expectation, and what becomes of a truncated answer."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from nemorl.losses import divergence, kl
from oracle.peers import load

Estimator = Callable[[Tensor, Tensor], Tensor]


def ours(estimator: str, gradient: str) -> Estimator:
    def run(logprobs: Tensor, reference: Tensor) -> Tensor:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        sampler = logprobs.detach() if gradient == "importance" else None
        return kl.kl(
            logprobs,
            reference,
            mask,
            estimator=estimator,
            gradient=gradient,
            generation_logprobs=sampler,
        )

    return run


def verl(estimator: str) -> Estimator:
    return lambda *both: load("verl.trainer.ppo.core_algos").kl_penalty(*both, estimator)


def openrlhf(estimator: str, unbiased: bool) -> Estimator:
    return lambda p, q: load("openrlhf.models.utils").compute_approx_kl(
        p, q, p.detach(), estimator, unbiased
    )


def estimators(peers: dict[str, str]) -> Iterator[tuple[str, Estimator]]:
    for name in ("k1", "k2", "k3"):
        yield f"nemorl `{name}`", ours(name, "pathwise")
    for gradient in ("score", "importance"):
        yield f"nemorl `k3, gradient={gradient}`", ours("k3", gradient)
    if "verl" in peers:
        for name in ("low_var_kl", "k3+"):
            yield f"verl `{name}`", verl(name)
    if "openrlhf" in peers:
        yield "OpenRLHF `k3`", openrlhf("k3", False)
        yield "OpenRLHF `k3, unbiased_gradient`", openrlhf("k3", True)


def kl_gradients(peers: dict[str, str]) -> Iterator[tuple[str, float, float]]:
    """Yield an estimator, and how far its expected gradient is from both exact ones.

    The policy and the reference have five tokens; the expectation is a sum over them. No estimate
    reaches the clamps, where it has no gradient.
    """
    draw = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 5, generator=draw, dtype=torch.float64) / 2
    logits.requires_grad_()
    reference = reference.log_softmax(-1)

    def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(loss(logits.log_softmax(-1)), logits)[0]

    exact = [
        gradient(lambda p, to=direction: divergence(p, reference, direction=to))
        for direction in ("reverse", "forward")
    ]
    for name, estimate in estimators(peers):
        found = gradient(
            lambda p, of=estimate: (p.exp().detach() * of(p[None], reference[None])[0]).sum()
        )
        reverse, forward = ((found - wanted).abs().max().item() for wanted in exact)
        yield name, reverse, forward


def truncated_pair_collapses() -> bool:
    """Return whether two answers that differ become one in OpenRLHF's data set of pairs.

    They differ in the last token that is kept, which is overwritten by the end-of-text token.
    """
    dataset = load("openrlhf.datasets.reward_dataset").RewardDataset

    def tokenizer(text: str, *, max_length: int, **_: object) -> dict[str, Tensor]:
        ids = torch.tensor([[ord(letter) for letter in text]])[:, :max_length]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    tokenizer.eos_token, tokenizer.eos_token_id = "#", ord("#")  # type: ignore[attr-defined]
    pair = SimpleNamespace(
        prompts=["1+1="],
        chosen="",
        chosens=["2 is right"],
        rejects=["3 is right"],
        extras=[0],
        max_length=5,
        tokenizer=tokenizer,
    )
    chosen, _, rejected, *_ = dataset.__getitem__(pair, 0)
    return torch.equal(chosen, rejected)
