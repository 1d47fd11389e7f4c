"""How files have the tensors that are fused in a live model: of each expert its own, by names."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nemorl.models.adapters import live_tensors

Groups = tuple[tuple[str, ...], ...]
Stored = Mapping[str, Groups]
"""By the name of a live tensor, where files have others: of each part of its rows the name of each
expert's tensor. A tensor that only has another name is one group of one.
"""


def stored_names(model: Any) -> Stored:
    """Return the tensors of a model that files have otherwise, by transformers' own conversions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    own = getattr(model, "_weight_conversions", None)
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if not (rules := [rule for rule in rules if not isinstance(rule, PrefixChange)]):
        return {}
    found: dict[str, Groups] = {}
    model._weight_conversions = rules
    try:
        for name, tensor in live_tensors(model).items():
            outline = torch.empty(tensor.shape, device="meta")
            names = list(revert_weight_conversion(model, {name: outline}))
            if names != [name]:
                found[name] = _grouped(names)
    finally:
        model._weight_conversions = own
    return found


def _grouped(names: Iterable[str]) -> Groups:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"^(.*)\.\d+\.", r"\1.*.", name), []).append(name)
    return tuple(map(tuple, groups.values()))


def names_in_files(name: str, stored: Stored) -> list[str]:
    return list(chain(*stored.get(name, ((name,),))))


def of_parameters(keys: Iterable[str], stored: Stored) -> Stored:
    """Return how files have what belongs to live tensors, by keys `<live tensor's name>.<what>`.

    >>> of_parameters(["e.up.step", "norm.step"], {"e.up": (("e.0.up", "e.1.up"),)})
    {'e.up.step': (('e.0.up.step', 'e.1.up.step'),)}
    """
    parts = [(key, *key.rpartition(".")) for key in keys]
    return {
        key: tuple(tuple(f"{each}.{what}" for each in group) for group in stored[name])
        for key, name, _, what in parts
        if name in stored
    }


def as_stored(
    tensors: Iterable[tuple[str, Tensor]], stored: Stored
) -> Iterator[tuple[str, Tensor]]:
    """Yield live tensors as files have them; parts of fused ones are views."""
    for name, tensor in tensors:
        groups = stored.get(name, ((name,),))
        if len(groups) == 1 and len(groups[0]) == 1:
            yield groups[0][0], tensor
            continue
        yield from of_experts(groups, tensor)


def of_experts(groups: Groups, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a fused tensor with the experts from `first` on, by files' names."""
    for names, part in zip(groups, tensor.chunk(len(groups), 1), strict=True):
        yield from zip(names[first : first + len(part)], part.unbind(), strict=True)


def as_live(
    groups: Groups, read: Callable[[str], Tensor], *, first: int = 0, count: int | None = None
) -> Tensor:
    """Return a live tensor, or `count` of its experts from the `first` on."""
    end = None if count is None else first + count
    parts = (torch.stack([read(name) for name in names[first:end]]) for names in groups)
    return torch.cat([*parts], 1)


def shapes_of(tensors: Mapping[str, Tensor], stored: Stored) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that files have of live tensors."""
    outlines = ((name, torch.empty(x.shape, device="meta")) for name, x in tensors.items())
    return {name: tuple(tensor.shape) for name, tensor in as_stored(outlines, stored)}
