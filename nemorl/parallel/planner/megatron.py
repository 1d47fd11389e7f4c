"""Memory of a plan with trainer.backend megatron, by pipeline stage."""

from dataclasses import dataclass, replace
from functools import cached_property

from nemorl.parallel.planner.memory import BYTES, STATE, Memory, PlannedStep, layer_backward
from nemorl.parallel.planner.model_shape import Layer, Matrix


@dataclass(frozen=True)
class PlannedStage:
    """A device's layers: whole parameters and gradients, and a share of the optimizer."""

    step: PlannedStep
    index: int
    num_layers: int

    @property
    def is_last(self) -> bool:
        return self.index == self.step.plan.pp - 1

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations are kept (1F1B)."""
        plan, count = self.step.plan, self.step.micro_batches
        if plan.vpp == 1:
            return min(plan.pp - self.index, count)
        # Each goes through 1 / vpp of the layers at a time.
        ahead = (plan.vpp - 1) * plan.microbatch_group(count) + 2 * (plan.pp - self.index - 1)
        return min(ahead + 1, plan.vpp * count) / plan.vpp

    def ends(self) -> list[Matrix]:
        model = self.step.model
        embedding, *others = model.ends
        found = [embedding] if self.index == 0 else []
        if self.is_last:
            found += others + [embedding] * (model.tied and self.index > 0)
        return found

    @property
    def layer(self) -> Layer:
        """Each of its layers; of several kinds the largest."""
        return max(self.step.model.layers, key=lambda layer: sum(each.size for each in layer))

    @cached_property
    def parameters(self) -> int:
        """How many a device has, without experts."""
        plan = self.step.plan
        layer = sum(each.on(plan) for each in self.layer if not each.of_experts)
        return self.num_layers * layer + sum(each.on(plan) for each in self.ends())

    @cached_property
    def of_experts(self) -> int:
        plan = self.step.plan
        return self.num_layers * sum(each.on(plan) for each in self.layer if each.of_experts)

    def shares(self) -> tuple[int, int]:
        """Return how many devices have the same parameters, and the same experts."""
        plan = self.step.plan
        together = plan.data_ranks * plan.cp
        return together, together * plan.tp // plan.ep if plan.ep > 1 else together

    def states(self) -> Memory:
        step, numbers = self.step, self.parameters + self.of_experts
        size, gradient = step.dtype_size, BYTES[step.plan.reduce_dtype]
        main = STATE if size < STATE else 0
        together, alike = self.shares()
        updated = self.parameters // together + self.of_experts // alike
        return Memory(
            parameters=size * numbers,
            gradients=gradient * numbers * step.trains,
            optimizer=(main + 2 * STATE) * updated * step.trains,
            reference=size * numbers * step.work.keep_reference,
        )

    def kept_per_layer(self, *, recomputed: str) -> int:
        """Return what a layer keeps of a microbatch, in bytes."""
        step, plan, model = self.step, self.step.plan, self.step.model
        (q, kv, _), size, hidden = step.heads_width, step.dtype_size, model.hidden_size
        stream = hidden * size // step.token_split()
        if recomputed == "full":
            return step.tokens * stream
        upcast = STATE * hidden // step.token_split() if size < STATE else 0
        norms = 2 * (3 * stream + upcast)
        head_norms = 2 * STATE * (q + kv) * any("q_norm" in each.name for each in self.layer)
        reordered = 1.5 * (not step.work.trainer.sequence_packing or plan.cp > 1)
        modules = step.recomputed_modules if recomputed == "selective" else ()
        output = 0 if "core_attn" in modules else q * size
        attention = (q * (2 + reordered) + kv + 2 * step.kept_keys()) * size + output
        feed_forward = 0 if {"mlp", "moe"} & {*modules} else self.kept_of_feed_forward()
        return int(step.tokens * (norms + head_norms + attention + feed_forward))

    def kept_of_feed_forward(self) -> float:
        """Return bytes of a token."""
        step, model = self.step, self.step.model
        if model.num_experts:
            width = model.moe_intermediate_size // (step.plan.tp if step.plan.ep == 1 else 1)
            return self.rows_of_experts * (model.hidden_size + 6 * width) * step.dtype_size
        gated = any(block.gated for block in self.layer.blocks)
        return (5 if gated else 3) * step.heads_width[2] * step.dtype_size

    @property
    def rows_of_experts(self) -> float:
        """Rows that experts get for each of a device's tokens."""
        gathered = self.step.plan.ep == 1
        return self.step.model.num_experts_per_tok / (1 if gathered else self.step.token_split())

    def layer_backward(self) -> int:
        step, model = self.step, self.step.model
        if not model.num_experts:
            return layer_backward(step, self.layer)
        q, kv, _ = step.heads_width
        widest = max(3 * q + 2 * kv, 2 * self.rows_of_experts * model.hidden_size)
        return int(step.tokens * step.dtype_size * (widest + 2 * model.hidden_size))

    def training_memory(self) -> Memory:
        """Return the fullest moment: the backward pass of the head or of a layer."""
        step, how = self.step, self.step.plan.recomputes
        each = self.kept_per_layer(recomputed=how) * step.trains
        kept = round(self.in_flight * self.num_layers) * each
        again = self.kept_per_layer(recomputed="none") - each
        moments = [(kept + again + self.layer_backward() * step.trains, 0, 0)]
        if self.is_last:
            head = STATE * step.model.head.on(step.plan) * step.trains
            moments += [(kept + step.outer_activations(), step.logits_memory(), head)]
        activations, logits, gathered = max(moments, key=sum)
        activations += step.mask_memory()
        return replace(self.states(), activations=activations, logits=logits, gathered=gathered)
