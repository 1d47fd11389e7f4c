"""vLLM as asynchronous Ray actors, and weights on their way to them.

Others use `backend.VLLMGenerationBackend` (the generation backend "vllm") and `weights`, from a
trainer to engines. `replicas`, the driver's side, joins `routing` (a pure function: who answers
what) and `processes`; `engine` and `receiver` run in the engines' processes.
"""
