"""Every setting of a run, and its way from YAML and flags to frozen dataclasses.

Others use the config classes (base, policy, preference, generation, runtime), `load_config`,
`from_dict`, `to_dict`, `dump_yaml`, `flat` (tree), `parse_flags` (flags) and `preset` (presets).
"""
