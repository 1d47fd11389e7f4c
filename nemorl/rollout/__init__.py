"""Prompts → completions → rewards: the GenerationBackend protocol and the embedded torch engine,
environments and reward functions, and `collect`, which joins them. Others use `collect`,
`make_environment`, `SamplingParams` and `Completion` from their modules.
"""
