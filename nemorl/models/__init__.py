"""A single model: loading, adapters and tensor files.

Others use `load_causal_lm`, `load_tokenizer`, `model_folder`, `check_supported`, `usable_device`,
`merged_tensors` and `TensorFiles`.
"""
