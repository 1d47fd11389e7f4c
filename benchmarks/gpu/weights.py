"""New weights on their way to a vLLM engine, against a copy on the device; and from the ranks of a
run to engines on their GPUs, or on others.
"""

import json
import logging
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import weight_sync
from common import load_tokenizer, median_ratio, save_model

import nemorl
from benchmarks.gpu.first import GRPO, QUIET, even
from benchmarks.gpu.models import config_of, random_model
from benchmarks.gpu.part import Measurements, Row, Skip, require_package, row

BESIDE = {"colocated": True, "sleep_level": 0}
APART = {"colocated": False, "weight_transport": "nccl"}
PLACES = {True: "engines on their GPUs", False: "engines on other GPUs"}


def measurements(small: bool) -> Measurements:
    beside = "object store" if small else "CUDA IPC"
    yield beside, partial(transfer, beside, BESIDE, small)
    yield "NCCL", partial(transfer, "NCCL", APART, small)
    for colocated in (True, False):
        yield f"ranks, {PLACES[colocated]}", partial(from_ranks, colocated, small)


def transfer(name: str, settings: dict[str, Any], small: bool) -> Iterator[Row]:
    """Through the object store on a CPU, without an engine."""
    if name == "NCCL" and torch.cuda.device_count() < 2:
        raise Skip("NCCL needs a GPU for the trainer and another for the engine")
    require_package("ray" if small else "vllm")
    from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster

    options = weight_sync.Options(rounds=1, engine=False)
    if not small:
        options = weight_sync.Options(device="cuda", settings=settings)
    with RayVirtualCluster({"benchmark": [Bundle(cpus=1)]}, num_cpus=4):
        size, times = weight_sync.measure(10 if small else 1000, options)
    for what in filter("copy".__ne__, times):
        note = f"{size / median(times[what]) / 1e9:.2f} GB/s of float32"
        ratio = median_ratio(times[what], times["copy"])
        yield row(f"{name}, {what}: × the speed of a copy", ratio, note=note)


def from_ranks(colocated: bool, small: bool) -> Iterator[Row]:
    """Steps of GRPO on two ranks or more; on CPUs into the embedded engine."""
    gpus = torch.cuda.device_count()
    ranks = 2 if small else gpus if colocated else gpus // 2
    if ranks < 2:
        raise Skip(f"two ranks with {PLACES[colocated]} need {2 if colocated else 4} GPUs")
    require_package("ray" if small else "vllm")
    settings: dict[str, Any] = {**QUIET, **GRPO, "max_num_steps": 4, "parallel__dp_shard": ranks}
    if small:
        settings["trainer__device"] = "cpu"
    else:
        settings |= {"generation__backend": "vllm", "generation__colocated": colocated}
        settings |= {"generation__num_replicas": gpus if colocated else gpus - ranks}
    rows = [{"prompt": f"{number}"} for number in range(8)]
    logging.disable(logging.NOTSET)  # the run's log says which way weights take
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        tokenizer = load_tokenizer(folder / "model")
        if not small:
            random_model(config_of("0.5B"), "cpu").save_pretrained(folder / "model")
        done = nemorl.train(
            folder / "model",
            rows,
            tokenizer=tokenizer,
            reward_fn=even,
            run__dir=str(folder / "run"),
            **settings,
        )
        log = map(json.loads, (folder / "run" / "log.jsonl").read_text().splitlines())
        said = [line["message"] for line in log if line.get("event") == "weight_transport"]
    lines = [line for line in done.history if line["phase"] == "train"]
    note = f"{ranks} ranks, {said[0] if said else 'the embedded engine'}"
    what = f"ranks, {PLACES[colocated]}: seconds a sync"
    yield row(what, median(line["seconds_sync"] for line in lines[1:]), note=note)
    gap = max(line["token_mult_prob_error"] for line in lines)
    yield row(f"ranks, {PLACES[colocated]}: sampler against trainer", gap, at_most=1.05)
