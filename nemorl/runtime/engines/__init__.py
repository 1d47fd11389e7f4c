"""vLLM as asynchronous Ray actors, and weights on their way to them.

Others use `backend.VLLMGenerationBackend` alone (the generation backend "vllm"). The driver's side
is `replicas`, which joins `routing` (a pure function: who answers what, and its event loop),
`processes` and `supply` (who gets weights when); `actor`, `engine` and `receiver` run in the
engines' processes.
"""
