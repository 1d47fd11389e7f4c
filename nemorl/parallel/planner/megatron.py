"""Memory and traffic of a plan with trainer.backend megatron, by pipeline stage."""

from dataclasses import dataclass, replace
from functools import cached_property

from nemorl.parallel.planner.cost import Traffic, context_array, tensor_sends
from nemorl.parallel.planner.memory import BYTES, STATE, Memory, Step, pinned_size
from nemorl.parallel.planner.model_shape import Matrix

SCORES = 16
"""Bytes that a router keeps of a token and expert."""


@dataclass(frozen=True)
class Stage:
    """The layers that a device has, with the embedding on the first stage and the head on the last.

    Each data parallel rank keeps whole parameters and gradients, and a share of the optimizer.
    """

    step: Step
    index: int

    @property
    def is_last(self) -> bool:
        return self.index == self.step.plan.pp - 1

    @cached_property
    def num_layers(self) -> int:
        return _layers(self.step)[self.index]

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations all layers keep for the backward pass (1F1B)."""
        plan, count = self.step.plan, self.step.micro_batches
        if plan.vpp == 1:
            return min(plan.pp - self.index, count)
        # Each goes through 1 / vpp of the layers at a time.
        ahead = (plan.vpp - 1) * plan.microbatch_group(count) + 2 * (plan.pp - self.index - 1)
        return min(ahead + 1, plan.vpp * count) / plan.vpp

    def ends(self) -> list[Matrix]:
        """Return the parameters outside the layers; a tied embedding is on both ends."""
        embedding, norm, *head = self.step.model.ends()
        found = [embedding] if self.index == 0 else []
        if self.is_last:
            found += [norm, *(head or [embedding] * (self.index > 0))]
        return found

    @cached_property
    def parameters(self) -> int:
        """Numbers that a device computes with, but for experts."""
        plan, model = self.step.plan, self.step.model
        layer = sum(self._on_device(matrix) for matrix in model.layer() if not matrix.of_experts)
        return self.num_layers * layer + sum(matrix.on(plan) for matrix in self.ends())

    @cached_property
    def of_experts(self) -> int:
        """Numbers of its experts."""
        matrices = (each for each in self.step.model.layer() if each.of_experts)
        return self.num_layers * sum(each.on(self.step.plan) for each in matrices)

    def shares(self) -> tuple[int, int]:
        """Return how many devices have the same parameters, and the same experts."""
        plan = self.step.plan
        together = plan.data_ranks * plan.cp
        return together, together * plan.tp // plan.ep if plan.ep > 1 else together

    def _on_device(self, matrix: Matrix) -> int:
        """Where tp exceeds the key-value heads, several ranks have the same ones."""
        plan, model = self.step.plan, self.step.model
        repeated = max(1, plan.tp // model.num_key_value_heads)
        is_kv = matrix.name.startswith(("self_attn.k_proj", "self_attn.v_proj"))
        return matrix.on(plan) * (repeated if is_kv else 1)

    @cached_property
    def updated(self) -> int:
        """Numbers that the device's share of the optimizer updates."""
        parts = self.parameters, self.of_experts
        return sum(part // shares for part, shares in zip(parts, self.shares(), strict=True))

    def states(self) -> Memory:
        """Return what the device keeps from step to step."""
        step, numbers = self.step, self.parameters + self.of_experts
        size, gradient = step.dtype_size, BYTES[step.plan.reduce_dtype]
        main = STATE if size < STATE else 0  # parameters in float32, of which the others are casts
        return Memory(
            parameters=size * numbers,
            gradients=gradient * numbers,
            optimizer=(main + 2 * STATE) * self.updated,
            reference=size * numbers * step.work.keep_reference,
        )

    def host_memory(self, *, pinned: bool = True) -> int:
        """Return the main memory that a process takes for what is offloaded: buffers of parameters,
        AdamW's spans, and the frozen copy.

        pinned: as `Step.host_memory`; spans are counted as shares of whole parameters.
        """
        step, plan, states = self.step, self.step.plan, self.states()
        if not step.work.trainer.offload_during_generation:
            return 0
        if not pinned:
            return states.parameters + states.optimizer + states.reference
        size, copied = step.dtype_size, step.work.keep_reference
        parts = [numbers for numbers in (self.parameters, self.of_experts) if numbers]
        found = float(sum(plan.vpp * pinned_size(size * n // plan.vpp) for n in parts))
        experts = max(1, step.model.num_local_experts // plan.ep)
        layer = [(matrix, self.num_layers) for matrix in step.model.layer()]
        for matrix, count in [*layer, *((matrix, 1) for matrix in self.ends())]:
            each = experts if matrix.of_experts else 1
            numbers, share = self._on_device(matrix) // each, self.shares()[matrix.of_experts]
            spans = (2 + (size < STATE)) * pinned_size(STATE * numbers) / share
            found += count * each * (spans + copied * pinned_size(size * numbers))
        return int(found)

    def kept_per_layer(self, *, recomputed: str) -> int:
        """Return what a layer keeps of a microbatch for its backward pass.

        Each norm: its input in float32, the normed input and its output. Attention: queries, keys
        and values before and after their rotation, and the output. The feed-forward: five. Each
        expert: the tokens it gets, and six; the router: scores of all experts.
        """
        step, plan, model = self.step, self.step.plan, self.step.model
        (q, kv, _), size, hidden = step.heads_width, step.dtype_size, model.hidden_size
        stream = hidden * size // step.token_split()
        if recomputed == "full":
            return step.tokens * stream
        upcast = STATE * hidden // step.token_split() if size < STATE else 0
        norms = 2 * (3 * stream + upcast)
        head_norms = 2 * STATE * (q + kv) if model.qk_norm else 0
        reordered = 1.5 * (not step.work.trainer.sequence_packing or plan.cp > 1)
        modules = step.recomputed_modules if recomputed == "selective" else ()
        # The output of attention, and its logsumexp.
        output = 0 if "core_attn" in modules else q * size
        attention = (q * (2 + reordered) + kv + 2 * step.kept_keys()) * size + output
        feed_forward = 0 if {"mlp", "moe"} & {*modules} else self.kept_of_feed_forward()
        return int(step.tokens * (norms + head_norms + attention + feed_forward))

    def kept_of_feed_forward(self) -> float:
        """Return what `kept_per_layer` has of a token in the feed-forward block or experts."""
        step, model, size = self.step, self.step.model, self.step.dtype_size
        if not model.num_local_experts:
            return 5 * step.heads_width[2] * size
        kept = self.rows_of_experts * (model.hidden_size + 6 * self.experts_width) * size
        return kept + SCORES * model.num_local_experts / step.token_split()

    @property
    def experts_width(self) -> int:
        """Width of an expert on the device, which ranks of tensor parallelism split without ep."""
        plan = self.step.plan
        return self.step.model.moe_intermediate_size // (plan.tp if plan.ep == 1 else 1)

    @property
    def rows_of_experts(self) -> float:
        """Rows that its experts get for each of its tokens, where all get equally many."""
        gathered = self.step.plan.ep == 1
        return self.step.model.num_experts_per_tok / (1 if gathered else self.step.token_split())

    def layer_backward(self) -> int:
        """Return the gradients held at a time: those of attention or the feed-forward, or of what
        the experts gave and got.
        """
        step, model = self.step, self.step.model
        if not model.num_local_experts:
            return step.layer_backward()
        q, kv, _ = step.heads_width
        widest = max(3 * q + 2 * kv, 2 * self.rows_of_experts * model.hidden_size)
        return int(step.tokens * step.dtype_size * (widest + 2 * model.hidden_size))

    def training_memory(self) -> Memory:
        """Return the fullest moment: the backward pass of the head, with all activations, or of the
        last layer.
        """
        step, model, how = self.step, self.step.model, self.step.plan.activation_checkpointing
        kept = round(self.in_flight * self.num_layers) * self.kept_per_layer(recomputed=how)
        again = self.kept_per_layer(recomputed="none") if how == "full" else 0
        if how == "selective" and {"mlp", "moe"} & {*step.recomputed_modules}:
            again = self.kept_per_layer(recomputed="none") - self.kept_per_layer(recomputed=how)
        moments = [(kept + again + self.layer_backward(), 0, 0)]
        if self.is_last:
            head = STATE * (model.vocab_size // step.plan.tp) * model.hidden_size
            moments += [(kept + step.outer_activations(), step.logits_memory(), head)]
        activations, logits, gathered = max(moments, key=sum)
        return replace(
            self.states(),
            activations=activations + step.mask_memory(),
            logits=logits,
            gathered=gathered,
        )

    def traffic(self) -> Traffic:
        """Return what the device sends in a step; gradients are reduced once, at its end."""
        step, plan, model = self.step, self.step.plan, self.step.model
        count, layers = step.micro_batches, self.num_layers

        def sent(array: float, devices: int, times: float = 1) -> int:
            return int(times * array * (devices - 1) / devices)

        stream = step.tokens * model.hidden_size * step.dtype_size
        per_parameter = BYTES[plan.reduce_dtype] + step.dtype_size
        experts = 6 if step.recomputes_experts else 4
        ends = (self.index == 0) + 3 * self.is_last
        sends = 2 * plan.vpp - (self.index == 0) - self.is_last
        tied = model.tie_word_embeddings and plan.pp > 1 and (self.index == 0 or self.is_last)
        embedding = STATE * model.vocab_size // plan.tp * model.hidden_size
        together, alike = self.shares()
        return Traffic(
            shard=sent(per_parameter * self.parameters, together),
            expert_shard=sent(per_parameter * self.of_experts, alike),
            tensor=sent(stream, plan.tp, count * (layers * tensor_sends(step) + ends)),
            experts=sent(
                stream * self.rows_of_experts,
                plan.ep if plan.ep > 1 else plan.tp,
                count * layers * experts,
            ),
            context=sent(context_array(step), plan.cp, count * layers),
            pipeline=count * sends * stream // step.token_split()
            + (sent(embedding, 2, 2) if tied else 0),
        )


def _layers(step: Step) -> list[int]:
    """Return the layers of each device of pp."""
    stages = step.plan.stage_layers(step.model.num_hidden_layers)
    return [sum(map(len, stages[index :: step.plan.pp])) for index in range(step.plan.pp)]


def telling_stages(step: Step) -> list[Stage]:
    """Return stages of which some is the fullest, the busiest and the slowest one: with each number
    of layers the first, which keeps most activations, and the ends and their neighbor.
    """
    layers = _layers(step)
    last = len(layers) - 1
    found = {0, min(1, last), last, *map(layers.index, layers)}
    return [Stage(step, index) for index in sorted(found)]
