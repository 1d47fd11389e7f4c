"""Every setting of a run, and its way from YAML and flags to frozen dataclasses.

`tree` reads and writes them, `flags` parses them.
"""
