"""A GRPO run whose engine is on another node than the trainer; run as `python -m
tests.runtime.engines.far FOLDER`, it prints where things were.
"""

import json
import os
import sys
from pathlib import Path

from nemorl import GenerationConfig
from nemorl.runtime.engines.weights import own_place
from nemorl.runtime.run.callbacks import Callback
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
