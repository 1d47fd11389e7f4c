"""What checkpoints of ranks are checked with."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemorl.models.tensor_files import MANIFEST, TensorFiles, checksum, write_manifest
from nemorl.parallel.plan import ParallelPlan
from nemorl.runtime.store.export import write_checkpoint
from tests.ranks import run_ranks
from tests.tiny_models import tiny_tokenizer


def exported(folder: Path) -> Path:
    """What `nemorl export` makes of a backend's folder, as it is in a checkpoint of a run."""
    around = folder.with_name(f"{folder.name}, exported")
    shutil.copytree(folder, around / "policy")
    name = f"policy/{MANIFEST}"
    write_manifest(around, {name: checksum(around / name)})
    write_checkpoint(around / "hf", around / "policy", tiny_tokenizer())
    return around / "hf"


class Carried(TorchDispatchMode):
    """Notes the bytes of the largest collective call in its block."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.most = max(self.most, *(tensor.nbytes for tensor in tensors), 0)
        return func(*args, **(kwargs or {}))


def contents(folder: Path) -> dict[str, torch.Tensor]:
    stored = TensorFiles(folder.glob("*.safetensors"))
    return {name: stored.read(name) for name in stored.shapes}


def on_all(plan: dict[str, Any], function: Any, *args: Any) -> Any:
    """What a function returns on each rank of a plan; without one, in this process."""
    if not plan:
        return function(*args)
    first, *others = run_ranks(ParallelPlan(**plan).num_ranks, function, *args)
    assert all(other == first for other in others)
    return first


def assert_same(a: Path, b: Path, *, atol: float = 0) -> None:
    torch.testing.assert_close(contents(a), contents(b), atol=atol, rtol=0)
    assert (a / "backend.json").read_text() == (b / "backend.json").read_text()
