"""From settings to a run whose parts are live.

`launch.run` starts a run. `registry` knows algorithms, backends and loggers by name.
"""
