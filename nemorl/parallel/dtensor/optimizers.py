"""Optimizers by name, of parameters that ranks may share: numbers do not depend on the sharing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from nemorl.checks import require
from nemorl.models.adapters import full_tensor
from nemorl.models.causal_lm import head_of
from nemorl.parallel.config import OptimizerConfig
from nemorl.parallel.optimizer import make_adamw

BLOCK = 256
"""Numbers of a row that bitsandbytes scales together."""
State = dict[nn.Parameter, dict[str, Tensor]]


class Optimizers:
    """Several optimizers as one, each of parameters of its own."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> State:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Muon(torch.optim.Muon):
    """torch's Muon of matrices that ranks may share: each is made orthogonal whole, by one of its
    ranks in turn, and all ranks step together.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [each for each in group["params"] if each.grad is not None]
            for same in _by_mesh(matrices).values():
                if isinstance(same[0], DTensor):
                    self._step_shared(same, group)
                else:
                    for matrix in same:
                        matrix.mul_(1 - group["lr"] * group["weight_decay"])
                        matrix.add_(_orthogonal(self._update(matrix, group), group))

    def _step_shared(self, matrices: list[Any], group: dict[str, Any]) -> None:
        mesh = matrices[0].device_mesh
        axis = max(range(mesh.ndim), key=mesh.size)  # the ranks along it take turns
        count, this, ranks = mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
        for first in range(0, len(matrices), count):
            turn, own = matrices[first : first + count], torch.empty(0)
            for rank, matrix in enumerate(turn):
                whole = full_tensor(self._update(matrix, group))
                own = _orthogonal(whole, group) if rank == this else own
            for rank, matrix in enumerate(turn):
                change = own
                if rank != this:
                    change = torch.empty(matrix.shape, device=_local(matrix).device)
                dist.broadcast(change, group=ranks, group_src=rank)
                places = matrix.placements
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(distribute_tensor(change, mesh, places, src_data_rank=None))

    def _update(self, matrix: nn.Parameter, group: dict[str, Any]) -> Tensor:
        mean, grad = self.state[matrix], matrix.grad
        assert grad is not None
        if not mean:
            mean["momentum_buffer"] = torch.zeros_like(grad)
        momentum = mean["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"])


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    change = nn.Parameter(torch.zeros_like(update))
    change.grad = update
    settings = {name: group[name] for name in ("lr", "eps", "ns_coefficients", "ns_steps")}
    adjust = group["adjust_lr_fn"]
    torch.optim.Muon(
        [change], weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=adjust, **settings
    ).step()
    return change.detach()


class AdamW8bit:
    """bitsandbytes' AdamW of this rank's parts of matrices, in blocks that every sharing has."""

    def __init__(self, matrices: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        from bitsandbytes.optim import AdamW8bit as Inner

        for name, matrix in matrices.items():
            _require_blocks(name, matrix)
        options: dict[str, Any] = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        self.param_groups = [{"params": list(matrices.values()), **options}]
        self._own = {
            matrix: nn.Parameter(_local(matrix))
            for matrix in matrices.values()
            if _local(matrix).numel()  # of a few rows some ranks have none
        }
        self._inner = Inner(list(self._own.values()), min_8bit_size=0, **options)

    def zero_grad(self) -> None:
        for matrix in self.param_groups[0]["params"]:
            matrix.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self._inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for matrix, own in self._own.items():
            own.grad = None if matrix.grad is None else _local(matrix.grad).contiguous()
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
        """Take over the steps of `fresh_state`, whose other tensors are the live ones; of no state,
        begin anew.
        """
        if not state:
            self._inner.state.clear()
        for matrix, values in state.items():
            self._inner.state[self._own[matrix]]["step"] = int(values["step"])

    def _shared(self, matrix: Any, found: dict[str, Any]) -> dict[str, Tensor]:
        state = {"step": torch.tensor(float(found["step"]))}
        for name in ("state1", "state2", "absmax1", "absmax2"):
            local, shape = found[name], matrix.shape
            if name.startswith("absmax") and shape[-1] % BLOCK == 0:
                shape = torch.Size((*shape[:-1], shape[-1] // BLOCK))
                local = local.view(_local(matrix).shape[0], -1)
            if isinstance(matrix, DTensor) and matrix.device_mesh.size() > 1:
                where: Any = (matrix.device_mesh, matrix.placements)
                size: Any = {"shape": shape, "stride": (shape[-1], 1)}
                local = DTensor.from_local(local, *where, run_check=False, **size)
            state[name] = local
        return state


def _require_blocks(name: str, matrix: nn.Parameter) -> None:
    if isinstance(matrix, DTensor) and matrix.device_mesh.size() > 1:
        width = _local(matrix).shape[-1]
        require(
            width % BLOCK == 0,
            f"the rows of {name}",
            f"must be whole blocks of {BLOCK} numbers with optimizer.name adamw8bit on several"
            " ranks, of which its numbers would depend otherwise",
            width,
            "train on one rank, or take optimizer.name adamw",
        )


def _local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return found


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
        hidden.values(),
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return Optimizers(muon, adamw)


def _hidden_matrices(model: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    outer = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    outer.add(id(head_of(model).weight))
    return {
        name: each for name, each in trained.items() if each.ndim == 2 and id(each) not in outer
    }
