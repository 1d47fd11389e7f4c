"""Builds and starts a run from its settings.

`launch.run` starts a run. `registry` knows algorithms, backends and loggers by name.
"""
