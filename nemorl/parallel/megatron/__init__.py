"""TrainingBackend "megatron": a Hugging Face model in megatron-core, over tensor, pipeline, context
and data parallel ranks. `core` is the only file that imports megatron-core, `cpu` the only one that
knows that it can run without CUDA; `weights` converts tensors both ways. `engine` generates with
the weights that are trained.
"""
