"""A run, from its settings to live parts to its last step.

`open_run` opens a run for a loop, and `run` runs a registered one. `registry` knows algorithms,
backends and loggers by name. Others use `Run`, `Step` and `TrainResult`.
"""
