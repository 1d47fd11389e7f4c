"""vLLM as asynchronous Ray actors, and weights on their way to them.

Others use `backend.VLLMGenerationBackend` alone (the generation backend "vllm"). `replicas` is the
driver's side, `actor`, `engine` and `receiver` run in the engines' processes.
"""
