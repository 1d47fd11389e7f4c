"""The training algorithms: what one step of SFT, GRPO or DPO computes, and its loss.

Each module has `prepare(config, inputs) -> Job`, which the registry names. Algorithms of your own
use `loop` and the helpers of `common`.
"""
