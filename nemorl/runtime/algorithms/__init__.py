"""The training algorithms: a loop over an open run for each of SFT, GRPO and DPO, and its loss.

Others use `sft`, `grpo` and `dpo`, and `policy_loss`.
"""
