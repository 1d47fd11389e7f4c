"""Programs with a cluster of their own that print a line of JSON:
`python -m tests.runtime.workers.drivers NAME`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray

from nemorl.runtime.store.files import sweep_temporary
from nemorl.runtime.workers.cluster import (
    DRIVER,
    Bundle,
    ClusterLost,
    RayClusterError,
    RayVirtualCluster,
)
from nemorl.runtime.workers.worker import RayWorkerGroup
from tests.runtime.workers.conftest import TARGET


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def lost() -> None:
    """The cluster's head is killed while a call is in flight."""
    cluster = RayVirtualCluster({"a": [Bundle()]}, num_cpus=2)
    group = RayWorkerGroup(cluster.placement("a"), TARGET)
    sweep_temporary()  # leaves the living alone
    session = ray._private.worker._global_node.get_session_dir_path()
    alive = Path(session, "logs").is_dir()
    mode = Path(session).parents[1].stat().st_mode & 0o777
    head = next(one for one in psutil.Process().children() if one.name() == "gcs_server")
    head.kill()
    try:
        group.run_all("sleep", 600)
    except ClusterLost as error:
        show(error=str(error), session=session, alive=alive, mode=mode)


def nowhere() -> None:
    """RAY_ADDRESS is that of no cluster."""
    try:
        RayVirtualCluster({"a": [Bundle()]})
    except RayClusterError as error:
        show(error=str(error))


METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Push",
    "CoreWorkerService/PushTask",
)


def addresses() -> list[tuple[str, int]]:
    """Where this process and those below it listen."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = {each for one in processes for each in one.net_connections("inet")}
    return [each.laddr for each in sockets if each.status == "LISTEN"]


def answer(host: str, port: int, method: str) -> str:
    with grpc.insecure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code().name
    return "served"


def set_aside() -> None:
    """A GPU for a trainer outside of Ray, beside those of workers. (Ray only counts GPUs.)"""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    bundles = {"trainer": [Bundle(cpus=0, gpus=1, node=DRIVER)], "generation": [Bundle(gpus=1)] * 2}
    with RayVirtualCluster(bundles, num_cpus=2, num_gpus=3) as cluster:
        group = RayWorkerGroup(cluster.placement("generation"), TARGET)
        found = group.run_all("environment", "CUDA_VISIBLE_DEVICES")
        listening = addresses()
        served = [sorted({answer(*each, method) for method in METHODS}) for each in listening]
        group.shutdown()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    devices = [one["CUDA_VISIBLE_DEVICES"] for one in found]
    show(
        devices=devices,
        mode=os.environ.get("RAY_AUTH_MODE"),
        same_handlers=before == after,
        answers=served,
        hosts=sorted({host.removeprefix("::ffff:") for host, _ in listening}),
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
