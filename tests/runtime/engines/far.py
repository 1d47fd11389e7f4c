"""Engines on another node than the loop: `python -m tests.runtime.engines.far FOLDER` prints where
the parts of a GRPO run were, and `... FOLDER gpus` what engines got of a node that declares GPUs.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

from nemorl import GenerationConfig, ParallelPlan
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from nemorl.runtime.engines.transport import own_place
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.start.devices import Devices
from tests.runtime.engines.toys import MODEL, ToyReplicas
from tests.runtime.runs import grpo_config, start


class Look(Callback):
    def on_step_end(self, trainer, step, metrics) -> None:
        (process,) = trainer.generator._engines.running()
        self.seen = {"trainer": own_place().node, "engine": process.place.node}


def main(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    second = nodes.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = nodes.address
    generation = GenerationConfig(
        backend="vllm", num_replicas=1, max_new_tokens=4, engine={"kv_cache_memory_bytes": 2**26}
    )
    look = Look()
    try:
        result = start(
            grpo_config(folder, steps=3, generation=generation),
            callbacks=[look],
            hidden_size=128,
            head_dim=32,
        )
        print(
            json.dumps(
                {
                    **look.seen,
                    "nodes": [nodes.head_node.node_id, second.node_id],
                    "history": result.history,
                }
            )
        )
    finally:
        nodes.shutdown()


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


if __name__ == "__main__":
    (main, beside_gpus)["gpus" in sys.argv](Path(sys.argv[1]))
