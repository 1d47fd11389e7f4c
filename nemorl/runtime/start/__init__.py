"""Builds and starts a run from its settings.

`open_run` opens a run for a loop, and `run` runs a registered one. `registry` knows algorithms,
backends and loggers by name.
"""
