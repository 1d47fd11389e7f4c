"""Engines on another node than the loop: `python -m tests.runtime.engines.far FOLDER gpus` prints
what engines got of a node that declares GPUs, and `... FOLDER stages` what an engine samples whose
stages are on two nodes.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from unittest import mock

from nemorl import GenerationConfig, ParallelPlan, SamplingParams
from nemorl.models.adapters import merged_tensors
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.start.devices import Devices
from tests.rollout.updates import update
from tests.runtime.cluster.nodes import cluster_of
from tests.runtime.engines.in_flight import NEW, OLD, PROMPTS, Source, assert_of
from tests.runtime.engines.toys import MODEL, ToyReplicas
from tests.tiny_models import random_prompts, tiny_tokenizer


def beside_gpus(folder: Path) -> None:
    """The engines are toys, and the GPUs of the second node only numbers that Ray counts."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": 0}
    )
    second = nodes.add_node(num_cpus=2, num_gpus=2)
    os.environ["RAY_ADDRESS"] = nodes.address
    faults = {"step_s": (0.005,) * 2, "faults": str(folder)}
    config = GenerationConfig(
        backend="vllm", num_replicas=2, log_dir=str(folder / "logs"), engine=faults
    )
    backend = VLLMGenerationBackend(model=MODEL)
    try:
        with (
            mock.patch("torch.cuda.is_available", return_value=False),
            mock.patch("nemorl.runtime.engines.replicas.Replicas", ToyReplicas),
        ):
            Devices(plan=ParallelPlan(), ranked=False).check_cluster(BaseConfig(), config)
            backend.setup(config)
        replicas = backend._engines
        places = [process.place for process in replicas.running()]
        print(
            json.dumps(
                {
                    "on_gpus": replicas.spec.on_gpus,
                    "sleep_level": replicas.spec.sleep_level,
                    "gpus": sorted(place.gpus for place in places),
                    "second": [place.node == second.node_id for place in places],
                }
            )
        )
    finally:
        backend.shutdown()
        nodes.shutdown()


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


MODES = {"gpus": beside_gpus, "stages": stages}

if __name__ == "__main__":
    MODES[sys.argv[-1]](Path(sys.argv[1]))
