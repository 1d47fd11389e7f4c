"""A run and what it leaves on the disk: state, callbacks, directory, checkpoints, export, signals.

Others use `OpenRun`, `Step`, `Run`, `LoopState`, `Callback`, `notify`, `RunDirectory`, `locked`,
`signals_raise`, `temporary_folder`, `update_in_progress`, `sync_weights`, `TrainResult` and the
module `checkpoint`.
"""
