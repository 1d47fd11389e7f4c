"""A GPU emulated on a CPU: a second device, "fakegpu", with main memory behind it.

Inside `emulated()` an operator that gets tensors of both devices raises, as CUDA does, and waits of
the host for the device are counted by kind and place. Of kernels only those in READS wait.
"""

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "fakegpu"
LIBRARY = str(Path(__file__).parent.parent / "nemorl")
aten = torch.ops.aten
READS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.nonzero.default, aten.masked_select.default, aten.bincount.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    *(aten.repeat_interleave.Tensor, aten.allclose.default, aten.multinomial.default),
    aten._linalg_check_errors.default,
}
"""Operators of which the host must know results, their shapes or errors."""
NUMBERS = ("fill", "masked_fill", "index_fill", "_foreach_", "_fused_", "lift_fresh")
"""Beginnings of operators that take a number of the host, besides pointwise ones."""
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    aten._index_put_impl_.default,
}


class Waits:
    """How often the host waited for the device, by what for; `places` says on which lines."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.places: Counter[str] = Counter()

    def add(self, what: str) -> None:
        self.found[what] += 1
        stack = traceback.extract_stack(sys._getframe(1))
        line = next((each for each in reversed(stack) if each.filename.startswith(LIBRARY)), None)
        where = f"{Path(line.filename).name}:{line.lineno}" if line else "elsewhere"
        self.places[f"{what} at {where}"] += 1

    @property
    def total(self) -> int:
        return self.found.total()


class _Moment:
    """Stands for a stream or an event: all is done in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    def synchronize(self) -> None:
        gpu.waits.add("synchronize")

    def __enter__(self) -> "_Moment":
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Module(backend_registration._DummyBackendModule):
    """`torch.fakegpu`."""

    Stream = Event = _Moment

    def __init__(self) -> None:
        self.waits = Waits()
        self.active = 0

    def is_available(self) -> bool:
        return self.active > 0

    def is_initialized(self) -> bool:
        return self.active > 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return "an emulated GPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return None

    def set_device(self, device: Any) -> None: ...

    def device(self, device: Any) -> Any:
        return nullcontext()

    def current_stream(self, device: Any = None) -> _Moment:
        return _Moment()

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        self.waits.add("synchronize")

    def empty_cache(self) -> None: ...

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return gpu.active > 0


gpu = _Module()
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=gpu, hook=_Hook())
DEVICE = torch.device(NAME, 0)


class Storage(torch.UntypedStorage):
    """Main memory that says it is the device's."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]

    def cpu(self) -> torch.UntypedStorage:  # type: ignore[override]
        raise NotImplementedError("a wait that is not counted")


class Emulated(Tensor):
    """A tensor of the device; `raw` has its numbers, in main memory."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Emulated":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
            requires_grad=raw.requires_grad,
        )
        made.raw = raw.detach() if raw.requires_grad else raw
        return made

    def __init__(self, raw: Tensor) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        gpu.waits.add("print")
        return f"Emulated({self.raw})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy: Tensor = Emulated(self.raw.clone())
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    # What goes below Python's dispatch.
    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        gpu.waits.add("tolist")
        return self.raw.tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        storage = self.raw.untyped_storage()
        storage.__class__ = Storage
        return storage

    def set_(self, storage: Any, *layout: Any) -> Tensor:  # type: ignore[override]
        return Emulated(torch.empty(0, dtype=self.dtype).set_(storage, *layout))

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def _without_lists(index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    return tuple(torch.tensor(each) if isinstance(each, list) else each for each in index)


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return an operator's result for the device. Raises: RuntimeError for tensors of both."""
    leaves = pytree.tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, Emulated)]
    others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Emulated)]
    target = kwargs.get("device")
    _count(func, args, kwargs, ours=bool(ours), others=others)
    if ours and others and _mixes(func, args, others):
        shapes = [tuple(x.shape) for x in others]
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found {DEVICE} and cpu"
            f" (shapes {shapes})"
        )
    if is_ours(target):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    plain_args, plain_kwargs = pytree.tree_map_only(Emulated, lambda x: x.raw, (args, kwargs))
    if func is aten.histc.default:  # CUDA's counts integers, a CPU's does not
        plain_args = (plain_args[0].float(), *plain_args[1:])
    out = func(*plain_args, **plain_kwargs)
    written = _written(func, args, kwargs)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    stays = is_ours(target) if target is not None and func in COPIES else ours or is_ours(target)
    if not stays:
        return out
    return pytree.tree_map_only(
        Tensor, lambda x: x if isinstance(x, Emulated) else Emulated(x), out
    )


def _mixes(func: Any, args: Any, others: list[Tensor]) -> bool:
    """Return whether CUDA would refuse an operator with some tensors of the device and `others`."""
    if func in COPIES or func.namespace == "c10d":
        return False
    if func in INDEXED:  # indices may be in main memory
        values = args[2:3] if len(args) > 2 and args[2].dim() else ()
        return any(not isinstance(x, Emulated) for x in (args[0], *values))
    name = func._schema.name.rpartition("::")[2]
    takes_numbers = torch.Tag.pointwise in func.tags or name.startswith(NUMBERS)
    return any(x.dim() or not takes_numbers for x in others)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to and returns."""
    if not any(each.alias_info and each.alias_info.is_write for each in func._schema.returns):
        return []
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False)]
    given += [(each, kwargs[each.name]) for each in schema if each.name in kwargs]
    return [value for each, value in given if each.alias_info and each.alias_info.is_write]


def _count(func: Any, args: Any, kwargs: Any, *, ours: bool, others: list[Tensor]) -> None:
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return
    if ours and func in READS:
        gpu.waits.add(str(func).removeprefix("aten.").partition(".")[0].strip("_"))
    elif ours and func in INDEXED:
        indices = [x for x in pytree.tree_leaves(args[1]) if isinstance(x, Tensor)]
        fills = len(args) > 2 and args[2].numel() == 1  # which is `masked_fill`
        if not fills and any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            gpu.waits.add("index by a mask")
        if any(not isinstance(x, Emulated) for x in indices):
            gpu.waits.add("index from main memory")
    elif func is aten._to_copy.default and kwargs.get("device") is not None:
        leaves, comes = isinstance(args[0], Emulated), is_ours(kwargs["device"])
        if leaves and not comes:  # also one that needn't wait: nobody knows when it has arrived
            gpu.waits.add("copy to main memory")
        elif comes and not leaves and not (kwargs.get("non_blocking") and _is_pinned(args[0])):
            gpu.waits.add("copy from main memory")
    elif func is aten.copy_.default and others and ours:
        way = "from" if isinstance(args[0], Emulated) else "to"
        if not (args[2:] == (True,) and _is_pinned(others[0])):
            gpu.waits.add(f"copy {way} main memory")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not all(type(x) in KNOWN for x in tensors):
            return NotImplemented  # DTensor's turn, whose parts come here
        here = any(isinstance(x, Emulated) for x in tensors) or is_ours(kwargs.get("device"))
        return (compute if here else _as_it_is)(func, args, kwargs)


KNOWN = (Tensor, Emulated, torch.nn.Parameter, torch.nn.Buffer)


def _as_it_is(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _pin(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), "pinned")


class _Functions(TorchFunctionMode):
    """What goes below Python's dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes = func in (torch.tensor, torch.as_tensor, torch.asarray)
        if makes and isinstance(args[0], list | tuple):  # numbers that are read one by one
            args = (pytree.tree_map_only(Emulated, lambda x: x.item(), args[0]), *args[1:])
        if makes and is_ours(kwargs.get("device")):
            if isinstance(args[0], Emulated):
                return args[0]
            options = {**kwargs, "device": "cpu"}
            needs_gradient = options.pop("requires_grad", False)
            gpu.waits.add("copy from main memory")
            return Emulated(func(*args, **options)).requires_grad_(needs_gradient)
        if kwargs.pop("pin_memory", False):
            return _pin(func(*args, **kwargs))
        first = args[0] if args else None
        if func is Tensor.pin_memory and not isinstance(first, Emulated):
            return first if _is_pinned(first) else _pin(first.clone())
        if func is Tensor.is_pinned and not isinstance(first, Emulated):
            return _is_pinned(first)
        return func(*args, **kwargs)


@contextmanager
def counted() -> Iterator[Waits]:
    """Count the waits of the block."""
    before, gpu.waits = gpu.waits, Waits()
    try:
        yield gpu.waits
    finally:
        gpu.waits = before


@contextmanager
def emulated() -> Iterator[Waits]:
    """Have the device in the block, in other threads, too; yield the waits of the host."""
    run = threading.Thread.run

    def run_inside(thread: threading.Thread) -> None:
        with _Dispatch(), _Functions():
            run(thread)

    future = torch.__future__
    before, gpu.waits = future.get_swap_module_params_on_conversion(), Waits()
    future.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    gpu.active += 1
    try:
        with (
            patch.object(threading.Thread, "run", run_inside),
            patch.object(torch.accelerator, "current_stream", gpu.current_stream),
            _Dispatch(),
            _Functions(),
        ):
            yield gpu.waits
    finally:
        gpu.active -= 1
        future.set_swap_module_params_on_conversion(before)


LOWERED = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm"),
    "scaled_dot_product_attention",
)
"""Operators that compute in autocast's type, as far as models use them."""


def _lowering(name: str) -> Any:
    """Return an operator that casts what it gets to autocast's type."""
    function, key = getattr(aten, name).default, torch._C.DispatchKey.AutocastPrivateUse1

    def lowered(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
        )
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return function(*args, **kwargs)

    return lowered


_autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_lowered = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
for _name in LOWERED:
    _lowered.impl(_name, _lowering(_name))
dist.Backend.default_device_backend_map[NAME] = "gloo"
