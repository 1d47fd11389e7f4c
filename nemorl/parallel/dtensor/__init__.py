"""The backend on PyTorch's DTensor: FSDP2, tensor and context parallelism of Hugging Face models.

Others use `backend.DTensorBackend`; `titan.py` alone knows torchtitan.
"""
