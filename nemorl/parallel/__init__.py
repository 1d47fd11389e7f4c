"""Training one model on many devices: the plan, the `TrainingBackend`, and its implementation.

Others use `plan.ParallelPlan`, `backend` (the Protocol), `config`, `dtensor.backend.DTensorBackend`
and, for `nemorl plan`, `planner`. No process is started here.
"""
