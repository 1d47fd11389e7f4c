"""Files that last: run directory, checkpoints, exports, records, locks and temporary folders, and
the state of a run that they keep.

Others use `RunDirectory`, `Run`, `LoopState`, `locked`, `temporary_folder`, `WorkerDied`,
`WorkerTimeout` and the modules `checkpoint` and `export`.
"""
