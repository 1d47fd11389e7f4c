"""What an optimizer step costs: time, memory, and how much of what the device could compute was put
to use.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import Max, Mean, Metrics

GIGABYTE = 1e9


def flops_per_step(
    model_config: Any, segment_lengths: Iterable[int], *, frozen_weights: bool = False
) -> float:
    """Floating-point operations of forward and backward pass over sequences of these lengths, in a
    decoder with this (Hugging Face) configuration.

        6 · N · Σ L  +  12 · layers · heads · head_dim · Σ L (L + 1) / 2

    N: weights of all matrices but the embeddings, with the output layer's, tied or not; each takes
    part in 2 operations per token forward and 4 backward. The other term is attention, of each
    token to itself and those before it: 4 operations forward per pair of tokens and number in a
    head, 8 backward. (PaLM's count has all L² pairs, about twice as many.) With `frozen_weights`,
    as in LoRA, the matrices need no gradients: 4 · N.

    What a program does beyond that, such as recomputing activations or computing padding, is no use
    to the model and doesn't count.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(hidden_size=4, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=10)
    >>> flops_per_step(config, [3]) == 6 * (4 * 4 * 4 + 3 * 4 * 8 + 10 * 4) * 3 + 12 * 4 * 6
    True
    """
    hidden, heads, layers = (
        model_config.hidden_size,
        model_config.num_attention_heads,
        model_config.num_hidden_layers,
    )
    head_dim = getattr(model_config, "head_dim", None) or hidden // heads
    kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
    per_layer = (
        2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * model_config.intermediate_size
    )
    weights = layers * per_layer + hidden * model_config.vocab_size
    lengths = list(segment_lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return float(
        (4 if frozen_weights else 6) * weights * sum(lengths)
        + 12 * layers * heads * head_dim * pairs
    )


def segment_lengths(batch: TokenBatch) -> list[int]:
    """Tokens of each sequence of a batch, row by row.

    >>> from nemorl.data.batch import collate
    >>> segment_lengths(collate([{"input_ids": ids, "loss_mask": [False] * len(ids), "response_mask": [False] * len(ids)} for ids in ([5, 6], [7])]))
    [2, 1]
    """
    segments = batch.segment_ids.long()
    width = int(segments.max()) + 1 if segments.numel() else 1
    rows = torch.arange(len(segments), device=segments.device)[:, None]
    counts = torch.bincount(
        (rows * width + segments).flatten(), minlength=len(segments) * width
    ).reshape(-1, width)[:, 1:]
    return counts[counts > 0].tolist()


class StepMeter:
    """A clock around each optimizer step: `begin` before it, then `end` for what it cost. The batch
    is the whole step's, of all devices.

    The metrics may be merged over optimizer steps and over ranks, which changes nothing but that
    the memory is then the greatest of them:

    - trainer/seconds: of a step
    - trainer/memory_gb: in 10^9 bytes, on a GPU the most that tensors took in the step, elsewhere
      the most main memory that the process ever had
    - trainer/tflops_per_device: 10^12 floating-point operations per second and device, as
      `flops_per_step` counts them
    - trainer/mfu: the same as a share of the device's peak in bfloat16, where that is known (with
      torchtitan, whose table it is)
    """

    def __init__(
        self,
        model_config: Any,
        device: torch.device,
        num_ranks: int,
        *,
        frozen_weights: bool = False,
    ) -> None:
        self.model_config, self.device, self.num_ranks, self.frozen_weights = (
            model_config,
            device,
            num_ranks,
            frozen_weights,
        )
        self.peak_flops = peak_flops(device)
        self.started: float | None = None

    def begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            gpu_peaks.restart(self.device)
        self.started = time.perf_counter()

    def end(self, batch: TokenBatch) -> Metrics:
        assert self.started is not None, "call begin() first"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = torch.tensor(time.perf_counter() - self.started, dtype=torch.float64)
        work = (
            flops_per_step(
                self.model_config, segment_lengths(batch), frozen_weights=self.frozen_weights
            )
            / self.num_ranks
        )
        metrics: dict[str, Any] = {
            "trainer/seconds": Mean(seconds, torch.ones_like(seconds)),
            "trainer/memory_gb": Max(
                torch.tensor(peak_memory(self.device) / GIGABYTE, dtype=torch.float64)
            ),
            "trainer/tflops_per_device": Mean(
                torch.tensor(work / 1e12, dtype=torch.float64), seconds
            ),
        }
        if self.peak_flops is not None:
            metrics["trainer/mfu"] = Mean(
                torch.tensor(work / self.peak_flops, dtype=torch.float64), seconds
            )
        return metrics


class GpuPeaks:
    """Peaks of GPU memory since several beginnings, from the one counter that PyTorch has: one that
    restarts it keeps what the other still wants.
    """

    def __init__(self) -> None:
        self.before: dict[torch.device, int] = {}

    def restart(self, device: torch.device) -> None:
        """From now on `torch.cuda.max_memory_allocated` is the peak since now."""
        device = _numbered(device)
        self.before[device] = max(
            self.before.get(device, 0), torch.cuda.max_memory_allocated(device)
        )
        torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> int:
        """The peak since the last call of this, on the current device, whoever has restarted the
        counter meanwhile; and restart it.
        """
        device = _numbered(torch.device("cuda"))
        peak = max(self.before.pop(device, 0), torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak


def _numbered(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


gpu_peaks = GpuPeaks()
"""Of this process."""


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the peak of what tensors took since `begin`, elsewhere of the process's main
    memory since it began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if (
        status.exists()
    ):  # ru_maxrss would be that of the process which started this one, where that is greater
        return 1024 * next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if os.uname().sysname == "Darwin" else 1024
    )


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations per second that the device could do in bfloat16, from torchtitan's
    table; None where it has no entry.
    """
    if device.type != "cuda":
        return None
    try:
        from nemorl.parallel.dtensor import titan
    except ValueError:  # torchtitan is not installed
        return None
    return titan.peak_flops(torch.cuda.get_device_name(device))
