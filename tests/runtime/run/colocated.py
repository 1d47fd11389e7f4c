"""A GRPO run whose engines share the GPUs of ranks that Ray places, as a line of JSON.

The head of the cluster, where the loop is, has no GPU. Two nodes declare two that Ray only counts.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import ray

import nemorl
from nemorl.runtime.watch.callbacks import Callback
from nemorl.runtime.workers import cluster
from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster
from tests.runtime.runs import addition_rows, digits, grpo_config, saved_model
from tests.runtime.workers.nodes import cluster_of


class Look(Callback):
    def on_step_end(self, trainer, step, metrics) -> None:
        def facts(places: Any) -> list[Any]:
            return [[place.node, *place.gpus] for place in places]

        engines = [process.place for process in trainer.generator._engines.running()]
        self.seen = {"ranks": facts(trainer.trainer.places), "engines": facts(engines)}


def config_of(folder: Path, **generation: Any) -> nemorl.GRPOConfig:
    given = {"num_replicas": 2, "sleep_level": 0, "max_new_tokens": 4, **generation}
    return grpo_config(
        folder / "run",
        steps=2,
        model=nemorl.ModelConfig(path=str(folder / "model")),
        trainer=nemorl.TrainerConfig(),
        parallel=nemorl.ParallelPlan(tp=2, param_dtype="float32"),
        generation=nemorl.GenerationConfig(
            backend="vllm", engine={"kv_cache_memory_bytes": 2**26}, **given
        ),
    )


def smallest(nodes: list[str]) -> list[int | None]:
    """Ask where torch sees no GPU; GPUs of 7 and 5 bytes; some taken; and a node that can't say."""
    both = [Bundle(cpus=0, gpus=1, node=node) for node in nodes[1:]]
    found = [cluster.smallest_of_cluster(both)]

    def memory() -> int:
        return {nodes[1]: 5, nodes[2]: 7}[ray.get_runtime_context().get_node_id()]

    def failing() -> int:
        raise ModuleNotFoundError("no nemorl here")

    with RayVirtualCluster({"taken": both}):
        for asked, answer in ((both, memory), (both[1:], memory), (both, failing)):
            with mock.patch.object(cluster, "_gpu_memory", answer):
                found.append(cluster.smallest_of_cluster(asked))
    return found


def main(folder: Path) -> None:
    size = {"num_cpus": 4, "num_gpus": 2}
    cluster, nodes = cluster_of({"num_cpus": 1, "num_gpus": 0}, size, size)
    os.environ["RAY_ADDRESS"] = cluster.address
    saved_model(folder / "model", scale=1.0, hidden_size=128, head_dim=32)
    look, data = Look(), {"train": addition_rows(), "reward": digits}
    refused = ""
    try:
        nemorl.run(config_of(folder, num_replicas=3), **data)
    except ValueError as error:
        refused = str(error)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = nemorl.run(config_of(folder), callbacks=[look], **data)
    facts = {"history": result.history, "refused": refused, "smallest": smallest(nodes)}
    print(json.dumps({**look.seen, **facts, "warned": [str(each.message) for each in warned]}))
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
