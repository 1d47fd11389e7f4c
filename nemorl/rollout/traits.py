"""What a generation backend says of itself before it is imported. Free of torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GenerationTraits:
    """Where a generation backend computes, and what it can sample.

    The defaults are the ones of a class that says nothing.
    """

    on_trainer: bool = False
    """Whether the trainer's ranks sample: it is made with `trainer` in place of `model`."""
    shares_model: bool = True
    """Whether it computes in the loop's process with the model that its `ModelSource` loads, the
    trainer's own where that is not on ranks.
    """
    embedded: bool = False
    """Whether it computes where the trainer does, so that generation.num_replicas and the settings
    after it are errors.
    """
    engines: bool = False
    """Whether Ray places it in processes of their own, as generation.num_replicas,
    tensor_parallel_size, cpus_per_replica and colocated say; where they share GPUs that Ray has
    given to ranks, it is made with `beside`, the places of these.
    """
    records_experts: bool = False
    """Whether completions carry the experts that computed each token, if asked for
    (trainer.router_replay); if not `on_trainer`, by the argument records_experts=True.
    """


EMBEDDED = GenerationTraits(embedded=True, records_experts=True)
"""Traits of the embedded engine, "torch"."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices for a generation backend, as its `check` gets them."""

    gpus: int
    """GPUs of this machine."""
    taken: int = 0
    """GPUs of this machine that the trainer computes on."""
    cluster: bool = False
    """Whether the Ray cluster at RAY_ADDRESS places engines: it says itself what it has."""
