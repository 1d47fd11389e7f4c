"""A policy loss of your own: a soft gate in place of clipping (after SAPO, Gao et al. 2025).

python examples/custom_loss.py                                         a small demonstration
python examples/custom_loss.py --model.path … --data.train …           all settings of grpo
nemorl grpo … --loss examples/custom_loss.py:soft_gate --loss.temperature 2      the same"""

import sys
from pathlib import Path

import nemorl

from grpo_loop import demonstration


@nemorl.register_loss("soft_gate")
def soft_gate(token_logprobs, prev_logprobs, advantages, loss_weights, *, temperature: float = 1.0):
    """−Σ w · A · σ(τ(r − 1)) · 4/τ: the gradient fades where the ratio r has left 1."""
    log_ratio = (token_logprobs - prev_logprobs).where(loss_weights != 0, 0.0).clamp(-20, 20)
    gate = (temperature * (log_ratio.exp() - 1)).sigmoid() * 4 / temperature
    return -(loss_weights * advantages * gate).sum()


if __name__ == "__main__":
    flags = sys.argv[1:] or demonstration(Path("runs/custom_loss"), "--num-updates-per-batch=2")
    sys.exit(nemorl.main(["grpo", "--loss=soft_gate", *flags]))
