"""Tensors whose memory is away from their device: `trainer.offload_during_generation`."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemorl.accelerator import is_accelerator, module_of


class Offloaded:
    """Moves the memory of tensors to main memory, pinned where they are a GPU's, and back.

    The tensors stay the same objects, as do views of them, but nothing may compute with them until
    `restore`.
    """

    def __init__(self) -> None:
        self._away: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(copy) for _, copy in self._away.values())

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._away

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors, of which several may share memory; what is away already stays there."""
        taken = {}
        for storage in (local_part(tensor).untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage._cdata not in taken:
                pinned = is_accelerator(storage.device)
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                taken[storage._cdata] = storage, copy.copy_(_bytes(storage), non_blocking=True)
        self._away |= taken
        devices = {storage.device for storage, _ in self._away.values()}
        modules = [module_of(device) for device in devices if is_accelerator(device)]
        for module in modules:
            module.synchronize()
        for storage, _ in taken.values():
            storage.resize_(0)
        for module in modules:
            module.empty_cache()

    def restore(self) -> None:
        """Move everything back, bit for bit. May be repeated after an error for lack of memory."""
        for storage, copy in self._away.values():
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        self._away.clear()

    def present(self, tensor: Tensor) -> Tensor:
        """Return a new tensor on the device, equal to one that is away; any other as it is."""
        local = local_part(tensor)
        found = self._away.get(storage_of(local))
        if found is None:
            return tensor
        # The storage may be a buffer of many parameters: only this one's part is copied.
        whole = found[1].view(local.dtype)
        part = whole.as_strided(local.shape, local.stride(), local.storage_offset())
        part = part.to(local.device, copy=True)
        if not isinstance(tensor, DTensor):
            return part
        return DTensor.from_local(
            part,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage of what this rank holds of a tensor."""
    return local_part(tensor).untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
