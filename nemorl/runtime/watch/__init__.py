"""What a person sees of a run: the display, the log, the loggers, plots, warnings and the report.

Others use `make_display`, `waiting_for_engines` and `waiting_for_ranks`, `recorded` and `event`
(log), `Recorder` and `LoggedRun` (loggers), `Callback` and signals (callbacks), the
callbacks of `alerts` and `curves`, and `write_report`.
"""
