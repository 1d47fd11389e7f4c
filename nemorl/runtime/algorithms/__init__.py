"""The training algorithms: what one step of SFT, GRPO or DPO computes, and its loss.

Each has `prepare(config, inputs) -> Job`. Algorithms of your own use `loop` and the helpers of
`common`.
"""
