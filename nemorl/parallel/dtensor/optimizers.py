"""Optimizers of parameters that ranks may share, whose numbers do not depend on the sharing."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from nemorl.checks import require
from nemorl.models.adapters import full_tensor
from nemorl.models.causal_lm import blocks_of, head_of
from nemorl.parallel.accumulation import Optimizers, State, local_part, make_adamw
from nemorl.parallel.config import OptimizerConfig

BLOCK = 256
"""Numbers of a row that bitsandbytes scales together."""


class Muon(torch.optim.Optimizer):
    """torch's Muon, of matrices that ranks may share and of stacks of experts' matrices. A matrix
    is made orthogonal whole: a shared one by one of its ranks, while the others have other
    matrices; an expert's by the rank that has the expert.
    """

    def __init__(
        self, matrices: Iterable[Any], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shared: dict[Any, list[Any]] = {}
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                if isinstance(matrix, DTensor) and matrix.ndim == 2:
                    shared.setdefault(matrix.device_mesh, []).append(matrix)
                    continue
                local = local_part(matrix)
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(_change(local_part(self._update(matrix, group)), group["lr"]))
            for mesh, matrices in shared.items():
                self._step_shared(mesh, matrices, group)

    def _step_shared(self, mesh: Any, matrices: list[Any], group: dict[str, Any]) -> None:
        axis = max(range(mesh.ndim), key=mesh.size)  # the ranks along it share out the matrices
        count, this, ranks = mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
        for first in range(0, len(matrices), count):
            turn, own = matrices[first : first + count], torch.empty(0)
            for rank, matrix in enumerate(turn):
                whole = full_tensor(self._update(matrix, group))
                own = whole if rank == this else own
            # Not between the gathers, in which a rank would wait for the others' computation.
            own = _change(own, group["lr"]) if this < len(turn) else own
            for rank, matrix in enumerate(turn):
                change = own
                if rank != this:
                    change = torch.empty(matrix.shape, device=local_part(matrix).device)
                dist.broadcast(change, group=ranks, group_src=rank)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(distribute_tensor(change, mesh, matrix.placements, src_data_rank=None))

    def _update(self, matrix: nn.Parameter, group: dict[str, Any]) -> Tensor:
        mean, grad = self.state[matrix], matrix.grad
        assert grad is not None
        if not mean:
            mean["momentum_buffer"] = torch.zeros_like(grad)
        momentum = mean["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"])


def _change(update: Tensor, lr: float) -> Tensor:
    """Return -lr · 0.2 √max(r, c) · the orthogonalized update, of each r × c matrix.

    Source: torch.optim.Muon with adjust_lr_fn match_rms_adamw, which takes no stacks.
    """
    rows, columns = update.shape[-2:]
    stack = update.reshape(-1, rows, columns).bfloat16()
    x = stack.mT if rows > columns else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):  # Newton–Schulz
        gram = x @ x.mT
        step = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, step, x, beta=3.4445)
    x = x.mT if rows > columns else x
    rate = lr * 0.2 * math.sqrt(max(rows, columns))
    return x.to(update.dtype).mul(-rate).reshape(update.shape).contiguous()


class AdamW8bit:
    """bitsandbytes' AdamW of this rank's parts of matrices, in blocks that every sharing has."""

    def __init__(self, matrices: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        from bitsandbytes.optim import AdamW8bit as Inner

        for name, matrix in matrices.items():
            stack = matrix.ndim > 2
            if stack or (isinstance(matrix, DTensor) and matrix.device_mesh.size() > 1):
                size, what = local_part(matrix).shape[1:].numel(), "experts" if stack else "rows"
                require(
                    size % BLOCK == 0,
                    f"the {what} of {name}",
                    f"must be whole blocks of {BLOCK} numbers with optimizer.name adamw8bit",
                    size,
                    "take optimizer.name adamw" + ", or train on one rank" * (not stack),
                )
        options: dict[str, Any] = {
            "betas": (config.beta1, config.beta2),
            "lr": config.lr,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        self.param_groups = [{"params": list(matrices.values()), **options}]
        self._own = {
            matrix: nn.Parameter(local_part(matrix))
            for matrix in matrices.values()
            if local_part(matrix).numel()  # of a few rows some ranks have none
        }
        self._inner = Inner(list(self._own.values()), min_8bit_size=0, **options)

    def zero_grad(self) -> None:
        for matrix in self.param_groups[0]["params"]:
            matrix.grad = None

    @torch.no_grad()
    def step(self) -> None:
        settings = {k: v for k, v in self.param_groups[0].items() if k != "params"}
        self._inner.param_groups[0].update(settings)
        for matrix, own in self._own.items():
            own.grad = None if matrix.grad is None else local_part(matrix.grad).contiguous()
        self._inner.step()
        for own in self._own.values():
            own.grad = None

    @property
    def state(self) -> State:
        return {
            matrix: self._shared(matrix, self._inner.state[own])
            for matrix, own in self._own.items()
            if own in self._inner.state
        }

    def fresh_state(self) -> State:
        """Return `state` as it is before the first step, to be filled, and then kept by `keep`."""
        group = self._inner.param_groups[0]
        for index, own in enumerate(group["params"]):
            self._inner.init_state(group, own, 0, index)
        return self.state

    def keep(self, state: State) -> None:
        """Take over the steps of `fresh_state`, whose other tensors are live; with no state begin
        anew.
        """
        if not state:
            self._inner.state.clear()
        for matrix, values in state.items():
            self._inner.state[self._own[matrix]]["step"] = int(values["step"])

    def _shared(self, matrix: Any, found: dict[str, Any]) -> dict[str, Tensor]:
        state = {"step": torch.tensor(float(found["step"]))}
        for name in ("state1", "state2", "absmax1", "absmax2"):
            local, shape = found[name], matrix.shape
            if name.startswith("absmax") and shape[1:].numel() % BLOCK == 0:
                shape = torch.Size((shape[0], shape[1:].numel() // BLOCK))
                local = local.view(local_part(matrix).shape[0], -1)
            if isinstance(matrix, DTensor) and matrix.device_mesh.size() > 1:
                where: Any = (matrix.device_mesh, matrix.placements)
                size: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
                local = DTensor.from_local(local, *where, run_check=False, **size)
            state[name] = local
        return state


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizers:
    """Make the optimizer that the configuration names, of a model's trainable parameters."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    hidden = {} if config.name == "adamw" else _hidden_matrices(model, trained)
    adamw = make_adamw([each for name, each in trained.items() if name not in hidden], config)
    if not hidden:
        return Optimizers(adamw)
    if config.name == "adamw8bit":
        return Optimizers(AdamW8bit(hidden, config), adamw)
    muon = Muon(
        hidden.values(), lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum
    )
    return Optimizers(muon, adamw)


def _hidden_matrices(model: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    outer = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    outer.add(id(head_of(model).weight))
    blocks = blocks_of(model)
    stacks = {id(each) for block in blocks for each in block.experts.parameters(recurse=False)}
    return {
        name: each
        for name, each in trained.items()
        if each.ndim == 2 + (id(each) in stacks) and id(each) not in outer
    }
