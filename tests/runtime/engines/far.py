"""`python -m tests.runtime.engines.far FOLDER`: what an engine over two nodes samples."""

import asyncio
import json
import os
import sys
from pathlib import Path

from nemorl import GenerationConfig, SamplingParams
from nemorl.models.adapters import merged_tensors
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from tests.rollout.updates import update
from tests.runtime.engines.in_flight import NEW, OLD, PROMPTS, Source, assert_of
from tests.runtime.workers.nodes import cluster_of
from tests.tiny_models import random_prompts, tiny_tokenizer


def stages(folder: Path) -> None:
    """Greedy tokens of an engine with a stage on either node, and of the embedded engine."""
    nodes, ids = cluster_of({"num_cpus": 1}, {"num_cpus": 1})
    os.environ["RAY_ADDRESS"] = nodes.address
    backend = VLLMGenerationBackend(model=OLD, tokenizer=tiny_tokenizer())
    config = GenerationConfig(
        backend="vllm",
        pipeline_parallel_size=2,
        log_dir=str(folder),
        engine={"kv_cache_memory_bytes": 2**25},
    )
    prompts, greedy = random_prompts(4), SamplingParams(max_new_tokens=8, temperature=0.0)
    embedded = TorchGenerationBackend(model=OLD, tokenizer=tiny_tokenizer())
    try:
        backend.setup(config)
        update(backend, list(merged_tensors(OLD)), 0)
        placement = backend._engines._processes._placement
        embedded.setup(GenerationConfig())
        tokens = [
            [c.token_ids for c in one.generate(prompts, greedy)] for one in (backend, embedded)
        ]
        facts = {
            "nodes": ids,
            "stages": placement.nodes,
            "tokens": tokens,
            "proved": backend.metrics()["weights/proved"],
            "old": asyncio.run(changed_in_flight(backend)),
        }
        print(json.dumps(facts))
    finally:
        backend.shutdown()
        nodes.shutdown()


async def changed_in_flight(backend: VLLMGenerationBackend) -> list[int]:
    """Check that the tokens of requests are of the weights that they name, and return how many the
    old ones sampled of each.
    """
    (process,) = backend._engines.running()
    params = SamplingParams(seed=0, n=2, max_new_tokens=400, ignore_eos=True)
    begin = await process.actor.progress.remote()
    tasks = [asyncio.ensure_future(backend.sample(prompt, params)) for prompt in PROMPTS]
    while await process.actor.progress.remote() < begin + 60:
        await asyncio.sleep(0.01)
    await backend.update_weights(Source())
    old = []
    for prompt, answers in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
        for each in answers:
            old.append(each.policy_versions.count(0))
            assert_of(OLD, prompt, each, slice(old[-1]))
            assert_of(NEW, prompt, each, slice(old[-1], None))
    return old


if __name__ == "__main__":
    stages(Path(sys.argv[1]))
