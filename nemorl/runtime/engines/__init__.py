"""vLLM as asynchronous Ray actors, and weights on their way to them.

Others use `backend.VLLMGenerationBackend` (the generation backend "vllm") and `weights`, from a
trainer to engines. `replicas` is the driver's side, `routing` a pure function (who answers what);
`engine` and `receiver` run in the engines' processes.
"""
