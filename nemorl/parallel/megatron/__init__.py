"""TrainingBackend "megatron": a Hugging Face model in megatron-core, over tensor, pipeline, context
and data parallel ranks. `core` is the only file that imports megatron-core, and knows how it runs
without CUDA; `weights` converts tensors both ways; `engine` generates with the trained weights.
"""
