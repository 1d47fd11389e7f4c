"""A stage of a Hugging Face decoder as a model of megatron-core.

Attention, rotary angles and the head are the dtensor backend's, so that packed rows, context
parallelism and kinds of logprobs have one implementation.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from nemorl.accelerator import is_accelerator
from nemorl.models.attention import Rule
from nemorl.models.causal_lm import is_scalar
from nemorl.parallel.attention import ContextState, Segments, context_attention, segment_attention
from nemorl.parallel.megatron import core
from nemorl.parallel.megatron.limits import FAMILIES, without_rope
from nemorl.parallel.megatron.routing import Routes, follow_rows
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.tokens import HeadInputs, values_of
from nemorl.parallel.world import DTYPES, World, all_gather, all_gather_same, sum_backward
from nemorl.rollout.decoding import Pass, cached_attention

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
PLACE = {"layer_number", "attn_mask_type", "attention_type", "cp_comm_type", "pg_collection"}
"""Keywords with which megatron-core makes an attention and that change no number."""


@dataclass
class PackedRows(core.PackedSeqParams):
    """What attention needs to know of a microbatch, in what megatron-core passes on."""

    segments: Segments | None = None
    context: ContextState | None = None
    routes: Int[Tensor, "tokens layers topk"] | None = None
    """The experts of the tokens, in the layers of the stage; None: as routers choose."""
    copies: Float[Tensor, "tokens"] | None = None
    """For how many tokens of the batch each one stands; None where nothing balances experts."""
    cached: Pass | None = None
    """A generating pass, whose tokens attend to a cache."""


class Norm(nn.Module):
    """x / √(mean x² + eps) · weight of the last dimension; LayerNorm centers x, and has a bias."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight, self.eps = nn.Parameter(ones), eps
        centers = config.normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.zeros_like(ones)) if centers else None
        for parameter in self.parameters():
            # Its gradient is of this rank's tokens, and is summed over tp.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        size = values.shape[-1:]
        if self.bias is not None:
            return functional.layer_norm(values, size, self.weight, self.bias, self.eps)
        return functional.rms_norm(values, size, self.weight, self.eps)


class CoreAttention(core.MegatronModule):
    """Causal attention within each segment of rows, which may be split over cp."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **place: Any) -> None:
        if unknown := sorted(place.keys() - PLACE):
            raise TypeError(f"attention has keywords that are not supported: {', '.join(unknown)}")
        super().__init__(config=config)
        self.scale = softmax_scale
        self.index = 0

    def forward(
        self,
        query: Float[Tensor, "part batch heads dim"],
        key: Float[Tensor, "part batch kv_heads dim"],
        value: Float[Tensor, "part batch kv_heads dim"],
        attention_mask: None = None,
        *,
        packed_seq_params: PackedRows,
        attn_mask_type: Any = None,
        attention_bias: None = None,
    ) -> Float[Tensor, "part batch width"]:
        rows = packed_seq_params
        assert attention_mask is None and attention_bias is None
        if rows.cached is not None:
            return self._cached(rows.cached, query, key, value)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        rule = Rule(scaling=self.scale)
        if rows.context is None:
            output = segment_attention(q, k, v, rule=rule, segments=rows.segments)
        else:
            output = context_attention(q, k, v, rule=rule, context=rows.context)
        return output.transpose(0, 1).flatten(2).contiguous()

    def _cached(self, work: Pass, *values: Float[Tensor, "part 1 _ dim"]) -> Tensor:
        rows, size = work.input_ids.shape, work.input_ids.numel()
        query, key, value = (x[:size, 0].unflatten(0, rows).transpose(1, 2) for x in values)
        key, value = work.cache.update(key, value, self.index)
        output = cached_attention(query, key, value, work.visible, rule=Rule(scaling=self.scale))
        output = output.flatten(2).flatten(0, 1)[:, None]
        return functional.pad(output, (0, 0, 0, 0, 0, len(values[0]) - size))


class Router(core.TopKRouter):
    """Chooses experts where none are given, and may be balanced."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.router_replay = Routes()

    def routing(
        self, logits: Float[Tensor, "part batch experts"], padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().routing(self.router_replay.seen(logits), padding_mask)


class Stage(core.GPTModel):
    """A pipeline stage: from token ids, or what the stage before it sent, to hidden states, and on
    the last stage to log-probabilities or values.
    """

    def __init__(self, model: Any, world: World, part: int = 0) -> None:
        """part: number of the stage among this rank's.

        model: the Hugging Face model, which may be on the meta device.
        """
        number, last = world.stage(part), world.plan.pp * world.plan.vpp - 1
        hf, rotary = model.config, model.get_decoder().rotary_emb
        rotary = type(rotary)(config=hf)  # with numbers
        config = transformer_config(hf, world, rotary_factor=rotary.attention_scaling)
        spec = core.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = Norm
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if config.num_moe_experts:
            # megatron-core 0.19 has a partial here, 0.16 a ModuleSpec.
            parts = getattr(layer.mlp, "keywords", None) or vars(layer.mlp)
            parts["submodules"].router = Router
        counts = [*map(len, world.plan.stages.layers(config.num_layers))]
        first = sum(counts[world.stage(earlier)] for earlier in range(part))
        scalar = is_scalar(model)
        with world.device:  # for routers, which megatron-core would leave on the CPU
            super().__init__(
                config=config,
                transformer_layer_spec=core.TransformerBlockSubmodules(
                    layer_specs=[spec] * counts[number], layer_norm=Norm
                ),
                vocab_size=hf.vocab_size,
                max_sequence_length=hf.max_position_embeddings,
                pre_process=number == 0,
                post_process=number == last,
                share_embeddings_and_output_weights=hf.tie_word_embeddings and not scalar,
                position_embedding_type="none",  # `forward` makes the rotary angles
                vp_stage=part if world.plan.vpp > 1 else None,
            )
            if scalar and self.post_process:  # whole on each rank of tp
                self.output_layer = nn.Linear(
                    hf.hidden_size, 1, bias=False, dtype=config.params_dtype
                )
        for index, layer in enumerate(self.decoder.layers, first):
            attention = layer.self_attention.core_attention
            attention.index = index
            if config.no_rope_freq and config.no_rope_freq[layer.layer_number - 1]:
                attention.scale = config.kv_channels**-0.5  # without a factor of cosine and sine
        if "moe" in world.plan.recompute_modules:
            for layer in self.decoder.layers:
                recompute_experts(layer.mlp)
        self.number = number
        self.world, self.padding = world, getattr(hf, "pad_token_id", None)
        self.frequencies = rotary.inv_freq.to(world.device)
        follow_rows(self.decoder.layers)

    def forward(
        self,
        *,
        input_ids: Int[Tensor, "batch part"],
        position_ids: Int[Tensor, "batch part"],
        head_inputs: HeadInputs | None = None,
        cached: Pass | None = None,
        **rows: Any,
    ) -> Any:
        """Return hidden states `[part, batch, hidden]`; on the last stage what `head_inputs.needs`
        names, `[tokens]`, or of a `cached` pass the logits for this rank's part of the vocabulary,
        `[rows, part]`.
        """
        hidden = self._embedded(input_ids, position_ids) if self.pre_process else None
        # By the place in a sequence, not in the row as in megatron-core.
        angles = position_ids.t()[..., None].float() * self.frequencies
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, :, None],
            packed_seq_params=PackedRows(qkv_format="sbhd", cached=cached, **rows),
        )
        if not self.post_process:
            return hidden.contiguous()
        if head_inputs is not None:
            return self._outputs(hidden, head_inputs)
        assert cached is not None
        return functional.linear(self._read(hidden, cached.states), self._head_weight())

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return embeddings; the padding token's is not trained, as in Hugging Face."""
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.padding is None:
            return hidden
        is_padding = (input_ids == self.padding).t()[..., None]
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.world.plan.tp)[self.world.tp_rank]
        return torch.where(is_padding, hidden.detach(), hidden)

    def _head_weight(self) -> Tensor:
        for wait in self.output_layer._forward_pre_hooks.values():
            wait(self.output_layer, ())  # it may be gathered (`ShardedAdamW`), and is not called
        shares = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shares else self.output_layer.weight

    def _read(self, hidden: Tensor, states: Tensor, *, same: bool = False) -> Tensor:
        """same: whether all ranks of tp go on alike, not with parts of the vocabulary."""
        group = self.world.tp_group
        if group is not None and self.config.sequence_parallel:
            hidden = (all_gather_same if same else all_gather)(hidden, 0, group)
        elif group is not None and not same:
            hidden = sum_backward(hidden, group)
        return hidden.transpose(0, 1).flatten(0, 1).index_select(0, states)

    def _outputs(self, hidden: Tensor, inputs: HeadInputs) -> tuple[Tensor, ...]:
        weight, values = self._head_weight(), inputs.needs.values
        states = self._read(hidden, inputs.states, same=values)
        if values:
            return (values_of(states, weight),)
        return inputs.outputs(states, weight, self.world.tp_group)


def transformer_config(hf: Any, world: World, *, rotary_factor: float = 1.0) -> Any:
    """Return megatron-core's settings for a Hugging Face configuration.

    rotary_factor: of both cosine and sine.
    """
    plan, heads, on_gpu = world.plan, hf.num_attention_heads, is_accelerator(world.device)
    family = FAMILIES[hf.model_type]
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    dtype = DTYPES[plan.precision]
    return core.TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=getattr(hf, "num_key_value_heads", None) or heads,
        kv_channels=head_dim,
        softmax_scale=head_dim**-0.5 * rotary_factor**2,
        no_rope_freq=without_rope(hf),
        normalization=family.norm,
        layernorm_epsilon=getattr(hf, family.eps),
        gated_linear_unit=family.gated,
        activation_func=ACTIVATIONS[family.activation],
        add_bias_linear=family.bias is not None and getattr(hf, family.bias),
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=plan.vpp if plan.vpp > 1 else None,
        pipeline_model_parallel_layout=stage_parts(plan, hf.num_hidden_layers),
        context_parallel_size=plan.cp,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        # A loss is a sum: nothing is divided by microbatches, tokens or ranks.
        calculate_per_token_loss=True,
        # Stages send each other the shapes of microbatches.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Two ranks with several stages each would mix up batched messages.
        overlap_p2p_comm=plan.vpp > 1,
        batch_p2p_comm=on_gpu and plan.vpp == 1,
        batch_p2p_sync=False,  # would wait for the device at each hop, for older PyTorch
        # Gloo reads later what it sends; NCCL's stream is in order.
        deallocate_pipeline_outputs=on_gpu or plan.vpp == 1,
        **experts(hf, plan),
        **recomputed(plan),
    )


def recomputed(plan: ParallelPlan) -> dict[str, Any]:
    """Return megatron-core's settings for what is recomputed, but for `recompute_experts`."""
    if plan.recomputes == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if plan.recomputes == "none":
        return {}
    modules = [each for each in plan.recompute_modules or ("core_attn",) if each != "moe"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def recompute_experts(mixture: Any) -> None:
    """Have a mixture of experts computed again in the backward pass by the same routes, where
    megatron-core's router would follow the layer's last microbatch.
    """
    forward, routes = mixture.forward, mixture.router.router_replay

    def checkpointed(hidden: Tensor, **options: Any) -> Any:
        given, copies = routes.given, routes.copies

        def compute(hidden: Tensor) -> Any:
            routes.given, routes.copies = given, copies
            return forward(hidden, **options)

        return core.random.checkpoint(compute, False, hidden)

    mixture.forward = checkpointed


def stage_parts(plan: ParallelPlan, num_layers: int) -> list[list[str]] | None:
    """Return the parts of each stage; None without a pipeline.

    >>> stage_parts(ParallelPlan(pp=2), 3)
    [['embedding', 'decoder', 'decoder'], ['decoder', 'loss']]
    """
    if plan.pp == 1:
        return None
    found = [["decoder"] * len(stage) for stage in plan.stages.layers(num_layers)]
    found[0].insert(0, "embedding")
    found[-1].append("loss")
    return found


def experts(hf: Any, plan: ParallelPlan) -> dict[str, Any]:
    """Return megatron-core's settings for a mixture of experts, if there is one. Balancing them is
    done in `routing`: megatron-core's losses are of a microbatch.
    """
    if FAMILIES[hf.model_type].experts is None:
        return {}
    return {
        "num_moe_experts": hf.num_local_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": plan.ep,
        # With ep experts are whole: else ranks would gather unequally many tokens.
        "expert_tensor_parallel_size": 1 if plan.ep > 1 else plan.tp,
    }
