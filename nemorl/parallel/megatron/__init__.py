"""TrainingBackend "megatron": a Hugging Face model in megatron-core, over tensor, pipeline, context
and data parallel ranks.
"""
