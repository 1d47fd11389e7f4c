"""Which experts compute each token in a vLLM worker. Imported in the engines' processes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec

UNKNOWN = -1
"""Expert of a token that an engine did not record."""


@dataclass
class _Record:
    parts: list[np.ndarray] = field(default_factory=list)
    """`[tokens, layers, topk]`, one behind the other."""
    length: int = 0


class Recorder:
    """Records the experts of each request's tokens on a CPU, where vLLM does not.

    A token that another request has computed has the experts of that computation; one that is
    computed again keeps its first experts: the response was drawn with them.
    """

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's first model runner, `GPUModelRunner` or a subclass, with its cache.

        Raises: ValueError for a layer of experts whose kernel routes by itself.
        """
        self._runner, self._execute = runner, runner.execute_model
        groups = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        # Others forget the blocks of tokens that left their window.
        self._group = min(
            range(len(groups)), key=lambda i: not isinstance(groups[i], FullAttentionSpec)
        )
        self._block_size = groups[self._group].block_size
        self._records: dict[str, _Record] = {}
        self._cache: np.ndarray | None = None
        """`[blocks, tokens, layers, topk]`: experts of all tokens in vLLM's cache."""
        self._seen: dict[int, Tensor] = {}
        """`[tokens, topk]` of the current pass by layer."""
        for layer in expert_layers(runner.get_model()):
            if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise ValueError(
                    "trainer.router_replay needs experts that vLLM's router chooses, but the"
                    f" kernel of {layer.layer_name} chooses them itself: remove it, or the"
                    " quantization"
                )
            layer.router.set_capture_fn(partial(self._saw, layer.layer_id))
        runner.execute_model = self.execute_model

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        self._seen.clear()
        for id in scheduled.finished_req_ids:  # also of requests that were aborted
            self._records.pop(id, None)
        found = self._execute(scheduled, *args, **options)
        if scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return found

    def take(self, ids: Sequence[str]) -> list[np.ndarray]:
        """Return `[tokens, layers, topk]` of requests that have just finished, and forget them."""
        return [np.concatenate(self._records.pop(id).parts) for id in ids]

    def _saw(self, layer: int, experts: Tensor) -> None:
        self._seen[layer] = experts.short()

    def _keep(self, scheduled: Any) -> None:
        """Add what the pass computed to the cache, and to the requests what they lack."""
        layers = [self._seen[layer] for layer in sorted(self._seen)]
        rows = torch.stack(layers, 1).cpu().numpy()
        if self._cache is None:
            shape = (self._runner.kv_cache_config.num_blocks, self._block_size, *rows.shape[1:])
            self._cache = np.full(shape, UNKNOWN, np.int16)
        for source, target in scheduled.kv_cache_block_copies or ():
            self._cache[target] = self._cache[source]
        batch, begin, ends = self._runner.input_batch, 0, list[int]()
        for index, id in enumerate(batch.req_ids):
            first, count = (
                int(batch.num_computed_tokens_cpu[index]),
                scheduled.num_scheduled_tokens[id],
            )
            self._cache[self._places(id, first, first + count)] = rows[begin : begin + count]
            begin += count
            ends.append(first + count)
        # Requests read what all have written: they share blocks with others of the same pass, too.
        for id, end in zip(batch.req_ids, ends, strict=True):
            record = self._records.setdefault(id, _Record())
            if record.length < end:
                record.parts.append(self._cache[self._places(id, record.length, end)])
                record.length = end

    def _places(self, id: str, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = self._runner.requests[id].block_ids[self._group]
        number, place = np.divmod(np.arange(first, end), self._block_size)
        return np.asarray(blocks)[number], place


def expert_layers(model: nn.Module) -> list[Any]:
    """Return the model's layers of experts, in order."""
    found = [part for part in model.modules() if isinstance(part, MoERunner)]
    return sorted(found, key=lambda part: part.layer_id)
