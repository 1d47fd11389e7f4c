"""Training one model on many devices: the plan, the `TrainingBackend`, and its implementations.

The files here serve both backends, `dtensor/` and `megatron/`. Others use `plan.ParallelPlan`,
`backend` (the Protocol), `config` and, for `nemorl plan`, `planner`. `proving` alone starts
processes.
"""
