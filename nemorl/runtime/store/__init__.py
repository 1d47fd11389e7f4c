"""Files that last: run directory, checkpoints, exports, records, locks and temporary folders, and
what callbacks may read of a run.

Others use `RunDirectory`, `RunView`, `locked`, `temporary_folder`, `WorkerDied`,
`WorkerTimeout` and the modules `checkpoint` and `export`.
"""
