"""What a rank (or this process, for plans without ranks) does with a case."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.data.batch import TokenBatch
from nemorl.losses.types import finalize
from nemorl.models.adapters import full_tensor, live_tensors
from nemorl.models.tensor_files import as_stored, stored_names
from nemorl.parallel import attention
from nemorl.parallel.backend import ForwardOutput
from nemorl.parallel.config import (
    BackendConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.megatron.backend import MegatronBackend
from tests.parallel.parity.cases import LAYOUTS, Case
from tests.parallel.parity.golden import LORA_ALPHA, LORA_RANK, golden_batch
from tests.parallel.parity.losses import needs_in, watched
from tests.parallel.parity.reference import (
    BETAS,
    EPS,
    LR,
    MAX_GRAD_NORM,
    STEPS,
    WEIGHT_DECAY,
    Outcome,
)
from tests.parallel.parity.sabotage import SABOTAGES
from tests.parallel.varlen import used_on_cpus

Result = tuple[Outcome | None, dict[str, float], float]
"""What rank 0 found (other ranks: None), the first step's metrics as this rank has them, and by how
much copies of a token's numbers on this rank, which the loss saw more than once, differ.
"""


def run_cases(cases: tuple[Case, ...], folders: tuple[Path, ...], device: str) -> list[Result]:
    return [run_case(case, folder, device) for case, folder in zip(cases, folders, strict=True)]


def run_case(case: Case, folder: Path, device: str) -> Result:
    with ExitStack() as stack:
        if device == "fakegpu":
            from tests.emulated_gpu import emulated  # registers the device in this process

            stack.enter_context(emulated())
        if case.sabotage:
            stack.enter_context(SABOTAGES[case.sabotage]())
        calls = stack.enter_context(varlen_calls(device)) if case.varlen else [case]
        backend = MegatronBackend() if case.backend == "megatron" else DTensorBackend()
        stack.callback(gc.collect)
        stack.callback(backend.shutdown)
        backend.setup(config_of(case, folder, device))
        result = measure(backend, case)
        assert calls, "attention went another way"
        return result


@contextmanager
def varlen_calls(device: str) -> Iterator[list[Any]]:
    if not device.startswith("cuda"):
        with used_on_cpus() as calls:
            yield calls
        return
    calls, kernel = [], attention.varlen_attention

    def recorded(name: str, *given: Any) -> Tensor:
        calls.append(name)
        return kernel(name, *given)

    with patch.object(attention, "varlen_attention", recorded):
        yield calls


def config_of(case: Case, folder: Path, device: str) -> BackendConfig:
    return BackendConfig(
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(
            device=device,
            logprob_chunk=48,
            router_replay=case.problem.replay,
            **LAYOUTS[case.layout],
        ),
        optimizer=OptimizerConfig(
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            max_grad_norm=MAX_GRAD_NORM,
        ),
        lora=LoRAConfig(rank=LORA_RANK, alpha=LORA_ALPHA) if case.problem.lora else LoRAConfig(),
        parallel=case.parallel,
        total_steps=STEPS,
    )


def measure(backend: DTensorBackend | MegatronBackend, case: Case) -> Result:
    batch = golden_batch(case.problem)
    seen = Seen(batch)
    before, needs = backend.get_logprobs(batch).values, needs_in(case.problem.loss)
    sets = vars(backend.compute(batch, replace(needs, entropy=False)))
    torch.testing.assert_close(sets.pop("token_logprobs"), before, atol=0, rtol=0)
    losses, norms, gradients, metrics = [], [], {}, {}
    (part, *_) = backend.optimizer.parts
    adamw = part if isinstance(part, torch.optim.AdamW) else part.optimizer
    hook = adamw.register_step_pre_hook(lambda *_: gradients.update(gradients_of(backend)))
    for step in range(STEPS):
        watch = seen if step == 0 else lambda *_: None
        found = finalize(backend.train_step(batch, watched(case.problem.loss, watch)))
        if step == 0:
            hook.remove()
            metrics = found
        losses.append(found["loss"])
        norms.append(found["grad_norm"])
    clipped = min(1.0, MAX_GRAD_NORM / (norms[0] + 1e-6))
    token_logprobs, entropy = merged(seen)
    outcome = Outcome(
        logprobs=before,
        token_logprobs=token_logprobs,
        entropy=entropy,
        losses=tuple(losses),
        grad_norms=tuple(norms),
        gradients={name: gradient / clipped for name, gradient in gradients.items()},
        weights=stored(backend, backend.weights()),
        after=backend.get_logprobs(batch).values,
        sets=sets,
    )
    first = not dist.is_initialized() or dist.get_rank() == 0
    return outcome if first else None, metrics, seen.spread


def gradients_of(backend: DTensorBackend | MegatronBackend) -> dict[str, Tensor]:
    if isinstance(backend, MegatronBackend):
        whole = backend.conversion.whole(partial(megatron_gradient, backend))
        return stored(backend, whole)
    live = live_tensors(backend.model).items()
    return stored(backend, ((n, full_tensor(p.grad)) for n, p in live if p.grad is not None))


def stored(
    backend: DTensorBackend | MegatronBackend, tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """As files have them, which megatron's are already."""
    names = {} if isinstance(backend, MegatronBackend) else stored_names(backend.model)
    return dict(as_stored(((name, own.detach().cpu().clone()) for name, own in tensors), names))


def megatron_gradient(backend: MegatronBackend, name: str) -> Tensor:
    optimizer, parameter = backend.optimizer, backend._stages.get_parameter(name)
    own = None if optimizer.span(parameter) is None else optimizer.main(parameter).grad
    return optimizer.gathered(parameter, own)


class Seen:
    """The arguments of a rank's losses in the golden batch's layout; NaN where no call had the
    token.
    """

    def __init__(self, batch: TokenBatch) -> None:
        assert batch.generation_logprobs is not None
        real = (batch.segment_ids > 0).nonzero().tolist()
        self.places = {
            int(batch.generation_logprobs[row, column]): (row, column) for row, column in real
        }
        self.logprobs = torch.full(batch.input_ids.shape, torch.nan)
        self.entropy = self.logprobs.clone()
        self.spread = 0.0

    def __call__(self, output: ForwardOutput, part: TokenBatch) -> None:
        assert part.generation_logprobs is not None
        for row, column in (part.segment_ids > 0).nonzero().tolist():
            place = self.places[int(part.generation_logprobs[row, column])]
            for mine, values in (
                (self.logprobs, output.token_logprobs),
                (self.entropy, output.entropy),
            ):
                value = values[row, column].detach().cpu()
                if not mine[place].isnan():
                    self.spread = max(self.spread, float((mine[place] - value).abs()))
                mine[place] = value


def merged(seen: Seen) -> Tensor:
    arrays = torch.stack([seen.logprobs, seen.entropy])
    if dist.is_initialized():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, arrays)
        arrays = torch.stack(parts)
        high, low = arrays.nan_to_num(-torch.inf).amax(0), arrays.nan_to_num(torch.inf).amin(0)
        both = high.isfinite() & low.isfinite()
        seen.spread = max(seen.spread, float(torch.where(both, high - low, 0.0).max()))
        arrays = torch.where(both, high, torch.nan)
    real = torch.zeros(arrays.shape[1:], dtype=torch.bool)
    for place in seen.places.values():
        real[place] = True
    return torch.where(real, arrays, 0.0)
