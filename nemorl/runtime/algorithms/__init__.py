"""The training algorithms: a loop over an open run for each of SFT, GRPO, DPO and reward models,
and its loss.

Others use `sft`, `grpo`, `dpo` and `rm`, and `policy_loss`.
"""
