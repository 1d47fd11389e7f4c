"""From settings to a run whose parts are live: names, devices, trainer, generator, checkpoint.

`launch.run` starts a run. `registry` is the only place that knows algorithms, backends and loggers
by name; rooms above use it, and `settings` and `lengths`.
"""
