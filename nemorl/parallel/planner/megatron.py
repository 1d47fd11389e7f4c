"""Memory and traffic of a plan with trainer.backend megatron, by pipeline stage."""

from dataclasses import dataclass, replace

from nemorl.parallel.planner.cost import Traffic, context_array
from nemorl.parallel.planner.memory import BYTES, STATE, Memory, Step
from nemorl.parallel.planner.model_shape import Matrix


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

    @property
    def num_layers(self) -> int:
        return self.step.model.num_hidden_layers // self.step.plan.pp

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations are kept for backward (1F1B)."""
        return min(self.step.plan.pp - self.index, self.step.micro_batches)

    def ends(self) -> list[Matrix]:
        """Return the parameters outside the layers; a tied embedding is on both ends."""
        embedding, norm, *head = self.step.model.ends()
        found = [embedding] if self.index == 0 else []
        if self.is_last:
            found += [norm, *(head or [embedding] * (self.index > 0))]
        return found

    def parameters(self) -> int:
        """Return the numbers that a device computes with."""
        plan, model = self.step.plan, self.step.model
        layer = sum(self._on_device(matrix) for matrix in model.layer())
        return self.num_layers * layer + sum(matrix.on(plan) for matrix in self.ends())

    def _on_device(self, matrix: Matrix) -> int:
        """Where tp exceeds the key-value heads, several ranks have the same ones."""
        plan, model = self.step.plan, self.step.model
        repeated = max(1, plan.tp // model.num_key_value_heads)
        is_kv = matrix.name.startswith(("self_attn.k_proj", "self_attn.v_proj"))
        return matrix.on(plan) * (repeated if is_kv else 1)

    def states(self) -> Memory:
        """Return what the device keeps from step to step."""
        step, numbers = self.step, self.parameters()
        size, gradient = step.dtype_size, BYTES[step.plan.reduce_dtype]
        main = STATE if size < STATE else 0  # parameters in float32, of which the others are casts
        share = step.plan.data_ranks * step.plan.cp
        return Memory(
            parameters=size * numbers,
            gradients=gradient * numbers,
            optimizer=(main + 2 * STATE) * numbers // share,
            reference=size * numbers * step.work.reference,
        )

    def kept_per_layer(self, *, recomputed: str) -> int:
        """Return what a layer keeps of a microbatch for its backward pass.

        Each norm: its input in float32, the normed input and its output. Attention: queries, keys
        and values before and after their rotation, and the output. The feed-forward: five.
        """
        step, plan, model = self.step, self.step.plan, self.step.model
        (q, kv, inner), size, hidden = step.heads_width, step.dtype_size, model.hidden_size
        stream = hidden * size // step.token_split()
        if recomputed == "full":
            return step.tokens * stream
        upcast = STATE * hidden // step.token_split() if size < STATE else 0
        norms = 2 * (3 * stream + upcast)
        head_norms = 2 * STATE * (q + kv) if model.qk_norm else 0
        reordered = 1.5 * (not step.work.packed or plan.cp > 1)
        # The output of attention, and its logsumexp, which "selective" computes again.
        output = 0 if recomputed == "selective" else q * size
        attention = (q * (2 + reordered) + kv + 2 * step.kept_keys()) * size + output
        return step.tokens * int(norms + head_norms + attention + 5 * inner * size)

    def training_memory(self) -> Memory:
        """Return the fullest moment: the backward pass of the head, with all activations, or of the
        last layer.
        """
        step, model, how = self.step, self.step.model, self.step.plan.activation_checkpointing
        kept = self.in_flight * self.num_layers * self.kept_per_layer(recomputed=how)
        again = self.kept_per_layer(recomputed="none") if how == "full" else 0
        moments = [(kept + again + step.layer_backward(), 0, 0)]
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
        shares = plan.data_ranks * plan.cp
        per_parameter = BYTES[plan.reduce_dtype] + step.dtype_size
        # With sequence parallelism the backward pass gathers the inputs of products again.
        per_layer = 10 if plan.sequence_parallel else 8
        again = 4 if plan.activation_checkpointing == "full" else 0
        ends = (self.index == 0) + 3 * self.is_last
        neighbors = (self.index > 0) + (not self.is_last)
        tied = model.tie_word_embeddings and plan.pp > 1 and (self.index == 0 or self.is_last)
        embedding = STATE * model.vocab_size // plan.tp * model.hidden_size
        return Traffic(
            shard=sent(per_parameter * self.parameters(), shares),
            tensor=sent(stream, plan.tp, count * (layers * (per_layer + again) + ends)),
            context=sent(context_array(step), plan.cp, count * layers),
            pipeline=count * neighbors * stream // step.token_split()
            + (sent(embedding, 2, 2) if tied else 0),
        )
