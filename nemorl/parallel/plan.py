"""How one model is spread over many devices: the degree of each kind of parallelism.

Frozen, free of torch, checked by pure functions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from nemorl.checks import at_least, require

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How one model is spread over many devices, and what is traded for memory.

    Every plan gives the same numbers, up to rounding.
    """

    dp_replicate: int = 1
    """Copies of the model that train on different rows (HSDP's outer degree); gradients are summed
    over them.
    """
    dp_shard: int | None = None
    """Devices over which parameters, gradients and optimizer are sharded (FSDP2), each with rows of
    its own. None: all that the others leave.
    """
    tp: int = 1
    """Devices that split every layer between them (tensor parallelism). Keep it within a machine.
    """
    cp: int = 1
    """Devices that split every row between them (context parallelism), for long sequences."""
    cp_method: Literal["ulysses", "allgather"] = "ulysses"
    """How the parts of a row attend to each other. ulysses: exchange heads for tokens (cp must
    divide them); allgather: collect keys and values.
    """
    sequence_parallel: bool = True
    """With tp: norms and residuals are split over the row's tokens instead of being repeated."""
    param_dtype: Precision = "float32"
    """What the model computes in. Parameters and optimizer are kept in float32 either way."""
    reduce_dtype: Precision = "float32"
    """What gradients are summed over devices in."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: nothing, all but every second matrix product, or whole layers
    (less memory, about a third more time).
    """
    compile: bool = False
    """Compile every layer with torch.compile: slow to start, faster on GPUs."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in main memory (needs FSDP2); slower, for models
    that fit in no other way.
    """

    def __post_init__(self) -> None:
        at_least(
            1,
            parallel__dp_replicate=self.dp_replicate,
            parallel__dp_shard=self.dp_shard,
            parallel__tp=self.tp,
            parallel__cp=self.cp,
        )

    @property
    def model_ranks(self) -> int:
        """Devices that work on the same rows."""
        return self.tp * self.cp

    @property
    def num_ranks(self) -> int:
        """Devices that the plan asks for; where dp_shard is left open, the fewest."""
        return self.dp_replicate * (self.dp_shard or 1) * self.model_ranks

    @property
    def data_ranks(self) -> int:
        """Parts into which the rows of a batch are split."""
        return self.dp_replicate * (self.dp_shard or 1)

    @property
    def needs_ranks(self) -> bool:
        """Whether it takes processes started as ranks, be it a single one: what FSDP2 or torchtitan
        do is not done to a plain model.
        """
        return (
            self.num_ranks > 1
            or self.compile
            or self.cpu_offload
            or self.activation_checkpointing == "selective"
        )

    @property
    def row_multiple(self) -> int:
        """What the width of a row must be a multiple of: two chunks per device of cp (zig-zag),
        each divisible by tp.
        """
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def on(self, num_devices: int) -> "ParallelPlan":
        """The plan with dp_shard filled in. Raises ValueError that names the number that does not
        divide `num_devices`.

        >>> ParallelPlan(tp=2).on(8).dp_shard
        4
        """
        others = self.dp_replicate * self.model_ranks
        if self.dp_shard is not None:
            require(self.num_ranks == num_devices, "parallel", f"must ask for the {num_devices} devices that there are",
                    f"{self.num_ranks} = dp_replicate {self.dp_replicate} · dp_shard {self.dp_shard} · tp {self.tp} · cp {self.cp}",
                    "change a degree, or leave parallel.dp_shard out")  # fmt: skip
            return self
        require(num_devices % others == 0, "parallel", f"must divide the {num_devices} devices that there are",
                f"{others} = dp_replicate {self.dp_replicate} · tp {self.tp} · cp {self.cp}", "change a degree or the number of devices")  # fmt: skip
        return replace(self, dp_shard=num_devices // others)

    def problems(self, model: Any) -> Iterator[str]:
        """Why a model with this (Hugging Face) configuration can't be spread so: a sentence per
        number that does not divide.
        """
        heads, kv_heads = (
            model.num_attention_heads,
            getattr(model, "num_key_value_heads", None) or model.num_attention_heads,
        )
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": model.intermediate_size,
                 "vocab_size": model.vocab_size}  # fmt: skip
        for name, size in sizes.items():
            if size % self.tp:
                yield f"parallel.tp {self.tp} does not divide the model's {name} {size}"
        if self.cp > 1 and self.cp_method == "ulysses" and heads % (self.tp * self.cp):
            yield (f"parallel.cp {self.cp} · tp {self.tp} does not divide the model's num_attention_heads {heads}, which cp_method ulysses needs "
                   "(allgather does not)")  # fmt: skip

    def check(self, model: Any) -> None:
        """Raise a ValueError with everything in `problems`."""
        found = list(self.problems(model))
        if found:
            possible = [
                str(tp)
                for tp in range(1, 65)
                if not list(replace(self, tp=tp, cp=1).problems(model))
            ]
            only_cp = str(self.tp) in possible
            remedy = (
                "take parallel.cp_method allgather, or another cp"
                if only_cp
                else f"parallel.tp may be {', '.join(possible)} here"
            )
            raise ValueError(f"parallel must suit the model, but {'; '.join(found)}: {remedy}")
