"""How vLLM's workers take new weights, score tokens and, on CPUs, record experts. Imported in the
engines' processes only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_pp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.outputs import LogprobsTensors

from nemorl.losses.logprobs import filter_logits
from nemorl.models.tensor_files import tensor_checksum
from nemorl.runtime.engines.spec import Scoring
from nemorl.runtime.engines.weights import Bucket, NamedTensor, unpacked, uuid_of


class ExpertRecorder:
    """Records the experts of each request's tokens on a CPU, where vLLM does not.

    Without a cache of prefixes a request computes all its tokens. One that is computed again keeps
    its first experts: the response was drawn with them.
    """

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's first model runner, `GPUModelRunner` or a subclass.

        Raises: ValueError for a layer of experts whose kernel routes by itself.
        """
        self._runner, self._execute = runner, runner.execute_model
        self._records: dict[str, list[np.ndarray]] = {}
        """`[layers, topk]` of each token."""
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

    def take(self, id: str) -> np.ndarray:
        """Return and forget `[tokens, layers, topk]` of a finished request."""
        return np.stack(self._records.pop(id))

    def _saw(self, layer: int, experts: Tensor) -> None:
        self._seen[layer] = experts.short()

    def _keep(self, scheduled: Any) -> None:
        rows = torch.stack([self._seen[layer] for layer in sorted(self._seen)], 1).cpu().numpy()
        batch, begin = self._runner.input_batch, 0
        for id, first in zip(batch.req_ids, batch.num_computed_tokens_cpu, strict=False):
            record = self._records.setdefault(id, [])
            end = begin + scheduled.num_scheduled_tokens[id]
            record.extend(rows[begin + len(record) - first : end])
            begin = end


class TokenScorer:
    """Computes the prompt log-probabilities of requests whose `extra_args` have a `scoring`, and as
    `targets` the token after each of theirs.

    vLLM's own code has no temperature or filters, and may hold a prompt's logits.
    """

    rows = 256
    """Tokens whose logits are in memory at a time."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._worker: Any = getattr(runner, "prompt_logprobs_worker", None)
        if self._worker is None:
            runner._get_prompt_logprobs_dict = self.of_first_runner
        else:
            self._add, self._worker.add_request = self._worker.add_request, self.add_request
            self._worker.compute_prompt_logprobs = self.of_second_runner
        for layer in runner.get_model().modules():
            # It would take each row for a request's; no adapter is of the output layer.
            if isinstance(layer, LogitsProcessorWithLoRA):
                layer.punica_wrapper = SimpleNamespace(add_lora_logits=lambda logits, *_: logits)

    def of_first_runner(self, hidden: Tensor, scheduled: dict[str, int]) -> Any:
        runner, spans = self._runner, []
        for id in filter(scheduled.__contains__, runner.num_prompt_logprobs):
            request, row = runner.requests[id], runner.input_batch.req_id_to_index[id]
            first = int(runner.query_start_loc.np[row])
            states = hidden[first : first + scheduled[id]]
            asked = request.sampling_params.extra_args
            spans.append((id, asked, request.num_computed_tokens, states))
        found = {id: each.to_cpu_nonblocking() for id, each in self._finished(spans).items()}
        for id in found:
            del runner.num_prompt_logprobs[id]
        if found:
            runner._sync_device()
        return found

    def add_request(self, id: str, row: int, params: Any) -> None:
        self._add(id, row, params)
        if params.prompt_logprobs is not None:
            self._worker.in_progress_prompt_logprobs[id] = params.extra_args

    def of_second_runner(self, logits_of: Any, hidden: Tensor, batch: Any, *_: Any) -> Any:
        asked, ends = self._worker.in_progress_prompt_logprobs, batch.query_start_loc_np
        begins = batch.num_computed_prefill_tokens_np
        return self._finished(
            [
                (id, asked[id], int(begins[i]), hidden[ends[i] : ends[i + 1]])
                for i, id in enumerate(batch.req_ids)
                if id in asked
            ]
        )

    def _finished(self, spans: list[tuple[Any, ...]]) -> dict[str, LogprobsTensors]:
        """Score a pass's tokens; return the requests that need no other pass.

        spans: of each request its id, `extra_args`, number of tokens before, and states.
        """
        found = {}
        for scoring, group in groupby(spans, lambda span: span[1]["scoring"]):
            ids, asked, begins, states = zip(*group, strict=True)
            counts = [len(each) for each in states]
            targets = [
                one["targets"][begin : begin + count]
                for one, begin, count in zip(asked, begins, counts, strict=True)
            ]
            hidden, tokens = torch.cat(states), torch.cat(targets).to(states[0].device)
            chunks = [
                _scores(self._runner.model.compute_logits(rows), own, scoring)
                for rows, own in zip(hidden.split(self.rows), tokens.split(self.rows), strict=True)
            ]
            columns = [torch.cat(each).split(counts) for each in zip(*chunks, strict=True)]
            for id, one, begin, *own in zip(ids, asked, begins, *columns, strict=True):
                if begin:
                    own = [torch.cat(both) for both in zip(one["scores"], own, strict=True)]
                one["scores"] = own
                if len(own[0]) == len(one["targets"]):
                    found[id] = LogprobsTensors(*own, own[0][:, 0])
        return found


def _scores(logits: Tensor, targets: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    ids = targets[:, None]
    every = filter_logits(logits.float(), keep=targets, **vars(scoring.kind)).log_softmax(-1)
    top, likeliest = every.topk(scoring.top_k)
    return torch.cat([ids, likeliest], 1).int(), torch.cat([every.gather(-1, ids), top], 1)


def expert_layers(model: nn.Module) -> list[Any]:
    """Return a vLLM model's layers of experts, in order."""
    found = [part for part in model.modules() if isinstance(part, MoERunner)]
    return sorted(found, key=lambda part: part.layer_id)


@dataclass
class InitInfo(WeightTransferInitInfo):
    backend: str
    """ipc or nccl: vLLM's own engine for weights that stay on GPUs."""
    info: dict[str, Any]


class Receiver(WeightTransferEngine[InitInfo, Any]):
    """vLLM's layerwise reload, from Ray's object store or through one of vLLM's own engines. An
    update may be given up at any point.
    """

    init_info_cls = InitInfo
    inner: Any = None
    backend: str = ""
    tied: list[Any] | None = None
    kernels: Sequence[tuple[Any, Any, Any]] = ()
    uncounted: frozenset[str] = frozenset()
    """Parameters of layers whose numbers vLLM does not count as they come."""
    loaded: set[str] | None = None
    """Names that vLLM's model says it has loaded; None: it does not say."""
    arrived: list[NamedTensor]

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self.backend = init_info.backend
        config = WeightTransferConfig(backend=init_info.backend)
        make = WeightTransferEngineFactory.create_engine
        self.inner = make(config, self.vllm_config, self.device, self.model)
        self.inner.init_transfer_engine(self.inner.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        """Make layers wait for new weights, and forget those of an update that failed."""
        if self.tied is None:  # seen only while no update is under way
            self.tied = _tied_layers(self.model)
            # vLLM's own engines load through it, too.
            self.model.__dict__["load_weights"] = partial(self.load, self.model.load_weights)
            if self.device.type == "cpu":
                self.kernels = list(_packing_kernels(self.model))
        self.arrived, self.loaded = [], set()
        for method, _, _ in self.kernels:
            method.moe_kernel = None  # vLLM packs experts' weights only as it makes a kernel
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        for part in self._parts():
            initialize_layerwise_reload(part)
        for layer in self.model.modules():
            if "sinks" in layer._parameters:  # vLLM copies gpt-oss's past their loader
                info = get_layerwise_info(layer)
                _place_kernel_tensors(layer, info)
                info.reset()
            if isinstance(layer, VocabParallelEmbedding) and layer.weight.is_meta:
                # vLLM would wait for the rows of padding, which are never sent.
                rows = layer.num_org_embeddings_per_partition
                layer.weight.weight_loader_numel = rows * layer.weight.shape[1]
        self.uncounted = frozenset(
            f"{name}.{own}"
            for name, layer in self.model.named_modules()
            if not (layer in self.tied or get_layerwise_info(layer).can_load())
            and not is_deferred_attention_layer(layer)
            for own, _ in layer.named_parameters(recurse=False)
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "bucket" in update_info:
            self.receive_weights(update_info["bucket"])
        else:
            self.inner.update_weights(update_info)

    def receive_weights(self, update_info: Bucket) -> None:
        self.model.load_weights(unpacked(update_info))

    def load(self, load: Any, weights: Iterable[NamedTensor]) -> set[str] | None:
        found = load(self._noted(weights))
        self.loaded = None if found is None or self.loaded is None else self.loaded | set(found)
        return found

    def _noted(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in weights:
            self.arrived.append((name, tensor_checksum(tensor)))
            yield name, tensor

    def checksums(self) -> list[tuple[str, int]]:
        names, found = zip(*self.arrived, strict=True) if self.arrived else ((), ())
        return list(zip(names, torch.stack(found).tolist() if found else (), strict=True))

    def finish_weight_update(self) -> None:
        """Raise RuntimeError that lists the layers without all of their weights."""
        names = {layer: name for name, layer in self.model.named_modules()}
        incomplete = [
            f"{names[layer]} ({info.load_numel} of {info.load_numel_total} numbers)"
            for part in self._parts()
            for layer in part.modules()
            if next(layer.parameters(recurse=False), None) is not None
            and not is_deferred_attention_layer(layer)
            and (info := get_layerwise_info(layer)).can_load()
        ]
        if incomplete:
            raise RuntimeError(
                "every weight of the engine must be sent, but these are incomplete:"
                f" {', '.join(incomplete)}"
            )
        if self.loaded is not None and (unloaded := self.uncounted - self.loaded):
            raise RuntimeError(
                "vLLM's model must load every weight, but it does not say that it has loaded"
                f" {', '.join(sorted(unloaded))}"
            )
        for part in self._parts():
            finalize_layerwise_reload(part, self.model_config)
        for method, kernel, config in self.kernels:  # whose biases are again the layers' own
            method.moe_kernel, method.moe_quant_config = kernel, config
        if self.inner is not None and self.backend == "ipc":
            self.inner.shutdown()  # gives a rank's buffer back until the next update
        for layer in self.tied or ():
            # On CPUs the layer computes with a repacked copy of the embedding's old parameter.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        if self.inner is not None:
            self.inner.shutdown()

    def _parts(self) -> list[nn.Module]:
        return [part for part in self.model.children() if part not in (self.tied or ())]


class WorkerExtension:
    """Mixed into vLLM's worker class, which so gets `Receiver`, too."""

    def nemorl_start_weight_update(self: Any) -> None:
        self._weight_update_active = False  # vLLM leaves it set when an update is given up
        self.start_weight_update()

    def nemorl_checksums(self: Any) -> list[tuple[str, int]]:
        return self.weight_transfer_engine.checksums()

    def nemorl_uuid(self: Any) -> str:
        device = self.device
        return uuid_of(device) if device.type == "cuda" else ""

    def nemorl_take_stage(self: Any) -> None:
        """Make room for a stage's input, as on GPUs a profiling run does."""
        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def nemorl_score_tokens(self: Any) -> None:
        self.nemorl_scorer = TokenScorer(self.model_runner)

    def nemorl_record_experts(self: Any) -> None:
        self.nemorl_recorder = ExpertRecorder(self.model_runner)

    def nemorl_take_experts(self: Any, id: str) -> np.ndarray | None:
        found = self.nemorl_recorder.take(id)
        return found if self.rank == 0 else None

    def nemorl_expert_layers(self: Any) -> list[int]:
        return [layer.layer_id for layer in expert_layers(self.model_runner.get_model())]


def _packing_kernels(model: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            yield method, kernel, method.moe_quant_config


def _tied_layers(model: nn.Module) -> list[Any]:
    """Layers all of whose parameters belong to an earlier one."""
    seen: set[int] = set()
    tied: list[Any] = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen:
            tied.append(layer)
        seen |= own
    return tied


WeightTransferEngineFactory.register_engine("nemorl", Receiver)
