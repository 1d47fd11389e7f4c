"""Every setting of a run, and its way from YAML and flags to frozen dataclasses.

A module per section (data, run, generation, runtime) and algorithm (base, sft, grpo, dpo); `tree`
reads and writes them, `flags` parses them, `presets` names some.
"""
