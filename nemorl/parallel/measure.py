"""What an optimizer step costs: time, memory, and the share of the device's peak that was used;
and its profile.
"""

import atexit
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from nemorl.accelerator import is_accelerator
from nemorl.checks import require, warn
from nemorl.data.batch import TokenBatch
from nemorl.losses.types import Max, Mean, Metrics, Sum
from nemorl.models.causal_lm import head_weight, on_meta
from nemorl.models.hub import has_own_code
from nemorl.parallel.attention import begins_and_lengths
from nemorl.parallel.config import ProfileConfig
from nemorl.parallel.plan import ParallelPlan

GIGABYTE = 1e9
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "GB300": 2.5e15,
    "B200": 2.25e15,
    "B300": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A6000": 155e12,
    "L40S": 362e12,
    "MI355X": 2.5e15,
    "MI325X": 1.3e15,
    "MI300X": 1.3e15,
    "MI250X": 191.5e12,
}
"""Dense bfloat16 operations per second by a part of a GPU's name, from data sheets; the first match
counts.
"""


def flops_per_step(
    model_config: Any,
    segment_lengths: Iterable[int],
    *,
    frozen_weights: bool = False,
    copied: float = 0,
    weights: float | None = None,
) -> float:
    """Return the floating-point operations of a decoder's forward and backward pass.

        6 · N · (Σ L − copied)  +  12 · layers · heads · head_dim · Σ L (L + 1) / 2

    N: weights of the matrices that a token is multiplied with (`weights_per_token`); 2 operations
    per token forward, 4 backward. The second term is causal softmax attention: 4 operations forward
    per pair and number in a head, 8 backward (PaLM counts all L² pairs); head_dim is the mean of
    keys' and values'. Windows, recomputation and padding don't count.

    model_config: a Hugging Face configuration.
    segment_lengths: L of each sequence.
    frozen_weights: as in LoRA, where matrices need no gradients: 4 · N.
    copied: tokens that are not computed again (`trainer.share_prompts`), but in attention.
    weights: N, where it is known.
    """
    weights = weights_per_token(model_config) if weights is None else weights
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or hidden // heads
    if (width := getattr(model_config, "v_head_dim", None)) is not None:  # latent attention
        head_dim = (model_config.qk_nope_head_dim + model_config.qk_rope_head_dim + width) / 2
    kinds = getattr(model_config, "layer_types", None)
    layers = model_config.num_hidden_layers
    if kinds is not None:
        layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    lengths = list(segment_lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    in_heads = 12 * layers * heads * head_dim * pairs
    return float((4 if frozen_weights else 6) * weights * (sum(lengths) - copied) + in_heads)


def weights_per_token(model_config: Any) -> float:
    """Return the weights of all matrices but the embeddings, with the output layer, tied or not; of
    experts those of a token.
    """
    model = on_meta(model_config, trust_remote_code=has_own_code(model_config))
    found = float(head_weight(model).numel())
    ends = (head_weight(model), model.get_input_embeddings().weight)
    for name, matrix in model.named_parameters():
        if matrix.ndim < 2 or any(matrix is end for end in ends):
            continue
        fused = "experts" in name and matrix.ndim > 2
        share = model_config.num_experts_per_tok / len(matrix) if fused else 1.0
        found += share * matrix.numel()
    return found


def segment_lengths(batch: TokenBatch) -> list[int]:
    """Return the tokens of each sequence of a batch, row by row."""
    return begins_and_lengths(batch.segment_ids)[1].tolist()


def of_step(
    batches: Sequence[TokenBatch], loss: torch.Tensor, grad_norm: torch.Tensor, lr: float
) -> Metrics:
    """Return every backend's metrics of an optimizer step on `batches`."""
    one = torch.tensor(1.0)
    return {
        "loss": Mean(loss, one),
        "grad_norm": Mean(grad_norm, one),
        "lr": Mean(torch.tensor(float(lr)), one),
        "num_tokens": Sum(torch.tensor(float(sum(batch.num_tokens for batch in batches)))),
    }


class StepMeter:
    """Measures optimizer steps: `begin` before each, then `end` with the batches of all devices and
    the `copied` tokens of this one's rows (`flops_per_step`).

    Metrics, which may be merged over steps and ranks:

    - trainer/seconds: of a step
    - trainer/memory_gb: 10^9 bytes; on a GPU the peak of tensors in the step, elsewhere of the
      process's main memory so far
    - trainer/tflops_per_device: 10^12 operations (`flops_per_step`) per second and device
    - trainer/mfu: the same as a share of the device's peak in bfloat16, where that is known
    - trainer/shared_fraction: `copied` as a share of all tokens
    """

    def __init__(
        self,
        model_config: Any,
        device: torch.device,
        plan: ParallelPlan,
        *,
        frozen_weights: bool = False,
    ) -> None:
        self.device, self.plan, self.peak_flops = device, plan, peak_flops(device)
        self.accelerated = is_accelerator(device)
        self.flops: Any = partial(
            flops_per_step,
            model_config,
            frozen_weights=frozen_weights,
            weights=weights_per_token(model_config),
        )
        self.started = 0.0

    def begin(self) -> None:
        if self.accelerated:
            torch.get_device_module(self.device).synchronize(self.device)
            gpu_peaks.restart(self.device)
        self.started = time.perf_counter()

    def end(self, batches: Sequence[TokenBatch], *, copied: int = 0) -> Metrics:
        memory, shared = main_memory_peak, copied / self.plan.model_ranks
        if self.accelerated:
            module = torch.get_device_module(self.device)
            module.synchronize(self.device)
            memory = partial(module.max_memory_allocated, self.device)

        number = partial(torch.tensor, dtype=torch.float64)
        seconds = number(time.perf_counter() - self.started)
        lengths = [length for batch in batches for length in segment_lengths(batch)]
        work = self.flops(lengths) / self.plan.num_ranks + self.flops((), copied=shared)
        tokens = number(sum(lengths) / self.plan.num_ranks)
        metrics: dict[str, Any] = {
            "trainer/seconds": Mean(seconds, number(1.0)),
            "trainer/memory_gb": Max(number(memory() / GIGABYTE)),
            "trainer/tflops_per_device": Mean(number(work / 1e12), seconds),
            "trainer/shared_fraction": Mean(number(shared), tokens),
        }
        if self.peak_flops is not None:
            metrics["trainer/mfu"] = Mean(number(work / self.peak_flops), seconds)
        return metrics


class GpuPeaks:
    """Peaks of GPU memory for two readers of PyTorch's one counter."""

    def __init__(self) -> None:
        self.before: dict[torch.device, int] = {}

    def restart(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        if device.index is None:
            device = torch.device(device.type, module.current_device())
        peak = module.max_memory_allocated(device)
        self.before[device] = max(self.before.get(device, 0), peak)
        module.reset_peak_memory_stats(device)

    def take(self) -> int:
        """Return the peak on the current device since the last call, and restart the counter."""
        device = torch.device("cuda", torch.cuda.current_device())
        self.restart(device)
        return self.before.pop(device)


gpu_peaks = GpuPeaks()


def main_memory_peak() -> int:
    """Return the peak bytes of this process's main memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss
    # Not ru_maxrss, which is the parent process's where it had more.
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])


def peak_flops(device: torch.device) -> float | None:
    """Return a GPU's bfloat16 operations per second; None if unknown."""
    if not is_accelerator(device):
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


@dataclass(frozen=True)
class _Recording:
    profiler: Any
    config: ProfileConfig
    folder: Path
    rank: int
    first: int
    last: int


_recording: _Recording | None = None

QUIET_S = 0.1
"""How long other threads get to finish what they are recording."""


@contextmanager
def profiled(config: ProfileConfig, *, step: int, rank: int, last: bool = True) -> Iterator[None]:
    """Record the block as part of optimizer step `step` (from 1), if `config.steps` includes it.

    last: whether the step ends with the block.

    One recording has all of these steps and what is between them, in `config.dir` as
    rank0_steps10-12.json.
    """
    global _recording
    span = config.span
    if span is None:
        yield
        return
    if _recording is not None and (_recording.config, _recording.rank) != (config, rank):
        close_profile()
    if not span[0] <= step <= span[1]:
        close_profile()
        yield
        return
    if _recording is None:
        _recording = _begin(config, step, rank)
    _recording = replace(_recording, last=step)
    with record_function(f"optimizer step {step}"):
        yield
    if last and step == span[1]:
        close_profile()


def close_profile(of: ProfileConfig | None = None) -> None:
    """Write the open trace, if there is one; from any thread. An error is a warning.

    of: only one with this configuration.
    """
    global _recording
    recording = _recording
    if recording is None or of not in (None, recording.config):
        return
    _recording = None
    # torch would crash on reading what another thread is writing (pytorch pull request 187483).
    recording.profiler.toggle_collection_dynamic(False, [ProfilerActivity.CPU])
    time.sleep(QUIET_S)
    recording.profiler.stop()
    name = f"rank{recording.rank}_steps{recording.first}-{recording.last}.json"
    path, unfinished = recording.folder / name, recording.folder / f".{name}.part"
    try:
        recording.profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        warn(f"the trace {path} could not be written: {error}")
    finally:  # Ctrl-C leaves no half file
        unfinished.unlink(missing_ok=True)


def profile_folder(config: ProfileConfig) -> Path | None:
    """Return the folder of the traces, made if necessary; None where nothing is recorded.

    Raises: ValueError if it can't be written to.
    """
    if config.steps is None:
        return None
    require(
        bool(config.dir),
        "profile.dir",
        "must be given where no run has a directory for it",
        None,
        "name a folder (--profile.dir)",
    )
    folder = Path(str(config.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"profile.dir must be a folder that can be written to, but {config.dir} can't"
            f" ({error.strerror}): name another (--profile.dir)"
        ) from error
    return folder


def _begin(config: ProfileConfig, step: int, rank: int) -> _Recording:
    folder = profile_folder(config)
    assert folder is not None
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    # With all threads, or none but the one that began a recording could end it (torch 2.13).
    profiler = profile(
        activities=[ProfilerActivity.CPU, *gpu],
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    return _Recording(profiler, config, folder, rank, step, step)


atexit.register(close_profile)
