"""New weights on their way to a vLLM engine, against a copy on the device."""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import weight_sync
from common import median_ratio

from benchmarks.gpu.part import Measurements, Row, Skip, require_package, row

BESIDE = {"colocated": True, "sleep_level": 0}
APART = {"colocated": False, "weight_transport": "nccl"}


def measurements(small: bool) -> Measurements:
    beside = "object store" if small else "CUDA IPC"
    yield beside, partial(transfer, beside, BESIDE, small)
    yield "NCCL", partial(transfer, "NCCL", APART, small)


def transfer(name: str, settings: dict[str, Any], small: bool) -> Iterator[Row]:
    """Through the object store on a CPU, without an engine."""
    if name == "NCCL" and torch.cuda.device_count() < 2:
        raise Skip("NCCL needs a GPU for the trainer and another for the engine")
    require_package("ray" if small else "vllm")
    from nemorl.runtime.cluster.placement import Bundle, RayVirtualCluster

    options = weight_sync.Options(rounds=1, engine=False)
    if not small:
        options = weight_sync.Options(device="cuda", settings=settings)
    with RayVirtualCluster({"benchmark": [Bundle(cpus=1)]}, num_cpus=4):
        size, times = weight_sync.measure(10 if small else 1000, options)
    for what in filter("copy".__ne__, times):
        note = f"{size / median(times[what]) / 1e9:.2f} GB/s of float32"
        ratio = median_ratio(times[what], times["copy"])
        yield row(f"{name}, {what}: × the speed of a copy", ratio, note=note)
