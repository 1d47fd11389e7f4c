"""One training backend on many ranks: Ray actors, or the processes of torchrun.

Others use `trainer.make_trainer` (a `TrainingBackend` that stands for all ranks),
`generator.RankedGenerator` (the same ranks as a `GenerationBackend`),
`environment.is_follower` and `torchrun.follow`.
"""
