"""An open run: its parts and steps, callbacks, signals, and saving when it is due.

Others use `OpenRun`, `Step`, `Callback`, `notify`, `signals_raise`, `update_in_progress`,
`sync_weights` and `TrainResult`.
"""
