"""The peak memory of the real backend's training steps on a rank, and the bytes that it sends."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemorl.data.batch import Example, TokenBatch, collate
from nemorl.losses.masks import token_mean_weights
from nemorl.losses.supervised import nll
from nemorl.losses.types import LossOutput, needs
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.backend import ForwardOutput
from nemorl.parallel.config import BackendConfig, ModelConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from tests.parallel.batches import nll_loss

BACKENDS: dict[str, Any] = {"dtensor": DTensorBackend, "megatron": MegatronBackend}


OTHERS = {"policy": {}, "critic": {"head": "scalar"}, "teacher": {"trains": False}}


def measure_steps(
    folder: Path, plan: ParallelPlan, work: PlanConfig, models: tuple[str, ...] = ("policy",)
) -> tuple[int, int]:
    """This rank's peak bytes in an optimizer step after the first, and what it sends in another.

    models: names of `OTHERS`, which take a step in turn.
    """
    trainer = replace(
        work.trainer,
        device="cpu",
        train_micro_batch_size=work.micro_batch_rows,
        packed_row_tokens=work.seq_len if work.trainer.sequence_packing else None,
    )
    config = BackendConfig(
        model=ModelConfig(path=str(folder), from_scratch=not work.lora.rank),
        trainer=trainer,
        parallel=plan,
        lora=work.lora,
        keep_reference=work.keep_reference,
    )
    batch = _batch(2 * work.micro_batch_rows * plan.data_ranks, work)
    losses = {"policy": _loss_with_entropy if work.entropy else nll_loss, "critic": _value_loss}
    make = BACKENDS[work.trainer.backend]

    def step() -> None:
        for name, backend in backends.items():
            if name in losses:
                backend.train_step(batch, losses[name])
            else:
                backend.get_logprobs(batch)

    with Allocations() as recorded:
        # Adapters are for a trained model, and no weights lie in the folder. Nothing else holds it.
        backends = {
            name: make(load_causal_lm(str(folder), from_scratch=True) if work.lora.rank else None)
            for name in models
        }
        for name, backend in backends.items():
            backend.setup(replace(config, **OTHERS[name]))
        step()
        times = [time.time_ns()]
        for _ in range(3):
            step()
            times.append(time.time_ns())
    with SentBytes() as sent:
        step()
    for backend in backends.values():
        backend.shutdown()
    return min(recorded.peak(*span) for span in pairwise(times)), sent.total


def _batch(rows: int, work: PlanConfig) -> TokenBatch:
    length, count = (
        (work.seq_len // 4, 4 * rows) if work.trainer.sequence_packing else (work.seq_len, rows)
    )
    ids = torch.randint(2, 40, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    mask = [False] + [True] * (length - 1)
    batch = collate([Example(input_ids=row, loss_mask=mask, response_mask=mask) for row in ids])
    return replace(batch, loss_weights=token_mean_weights(batch.loss_mask))


@needs(entropy=True)
def _loss_with_entropy(output: ForwardOutput, batch: TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None
    plain = nll_loss(output, batch)
    return replace(plain, loss=plain.loss - 0.01 * (output.entropy * batch.loss_weights).sum())


@needs(values=True)
def _value_loss(output: ForwardOutput, batch: TokenBatch) -> LossOutput:
    assert batch.loss_weights is not None
    return nll(-(output.values**2), batch.loss_weights)


class Allocations:
    """Records what this thread allocates and frees. A thread of gloo may be the last to hold a
    buffer, which then counts until its address is used again: of two peaks, the lower is right.
    """

    def __enter__(self) -> "Allocations":
        config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), ""
        )
        _prepare_profiler(config, {ProfilerActivity.CPU})
        _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.STATIC_RUNTIME_OP})
        return self

    def __exit__(self, *_: Any) -> None:
        self.found = sorted(_allocations(_disable_profiler().experimental_event_tree()))

    def peak(self, begin: int, end: int) -> int:
        """The most bytes held between two times."""
        live: dict[int, int] = {}
        total = peak = 0
        for when, pointer, size in self.found:
            total -= live.pop(pointer, 0)
            if size > 0:
                live[pointer] = size
                total += size
            if begin <= when < end:
                peak = max(peak, total)
        return peak


def _allocations(events: Any) -> Iterator[tuple[int, int, int]]:
    """Time, pointer and size, negative where it is given back."""
    for event in events:
        if type(event.extra_fields).__name__.endswith("Allocation"):
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends by collectives in rings."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives come by as those of plain tensors
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.total += self._sent(name.split("::")[1], (*args, *(kwargs or {}).values()), result)
        return result

    def _sent(self, name: str, args: Any, result: Any) -> int:
        if name.startswith(("wait_tensor", "barrier", "_wrap")):
            return 0
        boxed = [value for value in args if isinstance(value, torch.ScriptObject)]
        named = [x for x in args if isinstance(x, str) and x not in ("sum", "max", "avg")]
        group = ProcessGroup.unbox(boxed[0]) if boxed else _resolve_process_group(named[0])
        size = group.size()
        if name.startswith("alltoall_base") and (splits := args[4]):  # the parts are unequal
            return args[1].nbytes * (sum(splits) - splits[group.rank()]) // max(1, sum(splits))
        whole = max(map(_nbytes, (*args, result)))
        rounds = 2 if name.startswith(("allreduce", "all_reduce")) else 1
        return rounds * whole * (size - 1) // size


def _nbytes(value: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(value)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
