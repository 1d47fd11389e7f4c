"""On which devices a run trains, checked against model and machine before anything starts."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nemorl.checks import refuse_unused, require, warn
from nemorl.models.capabilities import ASSUMED, known
from nemorl.parallel.backends import OwnLimits, check_training, limits_of
from nemorl.parallel.config import MICRO_BATCH_TOKENS
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.parallel.planner.memory import PlannedStep
from nemorl.parallel.planner.model_shape import model_shape
from nemorl.parallel.planner.sharing import GB, Sharing, check_states, sharing, smaller, training_of
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import Machine
from nemorl.runtime.config.base import BaseConfig, RuntimeConfig
from nemorl.runtime.engines.spec import check_shares
from nemorl.runtime.ranks import is_follower, torchrun_size
from nemorl.runtime.run.registry import check_generation


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run.

    >>> Devices.of(BaseConfig(parallel=ParallelPlan(tp=2)), {}).plan.dp_shard
    1
    """

    plan: ParallelPlan
    """Without an open degree, and with the precision that the devices take."""
    config: BaseConfig
    ranked: bool
    """Whether the model is on ranks in other processes; a single rank counts."""
    torchrun: bool
    """Whether torchrun has started the ranks, of which this process is one."""
    restarted: bool
    """Whether it has started them again after a failure."""
    on_gpus: bool
    accelerated: bool
    """Whether GPUs train, be they this machine's or a Ray cluster's."""
    machine: Machine

    @classmethod
    def of(
        cls,
        config: BaseConfig,
        environ: Mapping[str, str] = os.environ,
        *,
        num_gpus: int | None = None,
    ) -> "Devices":
        """Return the devices that `config` asks for: torchrun's, or as many as the degrees say."""
        started = torchrun_size(environ)
        torchrun, num_ranks = started is not None, started or config.parallel.num_ranks
        plan, limits = config.parallel.on(num_ranks), limits_of(config.trainer.backend)
        ranked = torchrun or plan.needs_ranks or limits.traits.needs_ranks
        on_cluster = ranked and not torchrun and bool(environ.get("RAY_ADDRESS"))
        _check_used(plan, config.runtime, torchrun=torchrun, ranked=ranked)
        if torchrun and not config.runtime.tp_across_nodes:
            _check_groups(plan.tp, environ)
        gpus = _num_gpus(config.trainer.device) if num_gpus is None else num_gpus
        check_device(config.trainer.device, ranked=ranked, has_gpus=on_cluster or gpus > 0)
        address, device = environ["RAY_ADDRESS"] if on_cluster else None, config.trainer.device
        accelerated = computes_on_accelerator(device, gpus=gpus, address=address)
        plan = plan.with_precision(accelerator=accelerated)
        config = replace(config, parallel=replace(config.parallel, param_dtype=plan.param_dtype))
        check_training(config, None, plan, limits)
        require(
            limits.traits.generates or not config.generation.traits.on_trainer,
            "generation.backend",
            "must be torch or vllm unless the trainer's ranks can generate, as megatron's do",
            config.generation.backend,
            "add --trainer.backend megatron, or remove it",
        )
        on_gpus = device != "cpu" and gpus > 0
        offloads = config.trainer.offload_during_generation
        require(
            not offloads or on_gpus or (on_cluster and device != "cpu"),
            "trainer.offload_during_generation",
            "needs a GPU that trains: on a CPU everything is in main memory",
            offloads,
            "remove it",
        )
        require(
            config.run.dir is not None or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0",
            "run.dir",
            "must be given where torchrun may start the run again",
            None,
            "add --run.dir",
        )
        _check_time(config, ranked=ranked)
        if ranked and not on_cluster and (on_gpus or not torchrun):
            here = int(environ.get("LOCAL_WORLD_SIZE", 1)) if torchrun else num_ranks
            _check_size(here, config.runtime, gpus=gpus if on_gpus else 0)
        for doubt in () if is_follower(environ) else config.doubts():
            warn(doubt)
        placed = num_ranks if on_gpus and ranked and not torchrun else 0
        given = config.generation.trainer_gpus
        found = cls(
            plan=plan,
            config=config,
            ranked=ranked,
            torchrun=torchrun,
            restarted=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0,
            on_gpus=on_gpus,
            accelerated=accelerated,
            machine=Machine(gpus=gpus, cluster=bool(environ.get("RAY_ADDRESS"))),
        )
        if found.placed and found.shares_gpus(config.generation):
            check_shares(
                config.generation,
                num_ranks // config.generation.devices_per_replica,
                f"{num_ranks} ranks",
            )
        taken = placed + (found.local_gpus if given is None else given)
        found = replace(found, machine=replace(found.machine, taken=taken))
        check_generation(config.generation, None, found.machine)
        return found

    @property
    def placed(self) -> bool:
        """Whether Ray places the ranks."""
        return self.ranked and not self.torchrun

    def shares_gpus(self, engines: GenerationConfig) -> bool:
        """Return whether engines are on GPUs on which the model trains."""
        trains = self.accelerated if self.placed else self.on_gpus
        return engines.traits.engines and engines.colocated and trains

    @property
    def local_gpus(self) -> int:
        """How many of this machine's GPUs train without Ray knowing it."""
        if not self.on_gpus or self.placed:
            return 0
        if self.torchrun:
            return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return self.plan.num_ranks

    @property
    def free_gpu(self) -> int | None:
        """A GPU of this machine on which nothing trains; torchrun and Ray take the first."""
        return self.machine.gpus - 1 if self.machine.gpus > self.machine.taken else None

    def check_model(self, model: Any) -> None:
        if model is not None:
            check_training(self.config, model, self.plan, limits_of(self.config.trainer.backend))
            check_generation(self.config.generation, model, self.machine)

    def check_cluster(self, engines: GenerationConfig) -> None:
        if not engines.traits.engines or not os.environ.get("RAY_ADDRESS"):
            return
        from nemorl.runtime.engines.replicas import engine_bundles
        from nemorl.runtime.ranks.actors import rank_bundles
        from nemorl.runtime.workers.cluster import (
            RayVirtualCluster,
            ResourcesError,
            connect,
            has_gpus,
            release,
        )

        connect()
        try:
            ranks = rank_bundles(self.config, self.plan.num_ranks, engines) if self.placed else []
            if self.placed and self.shares_gpus(engines):
                with RayVirtualCluster({"rank": ranks}) as cluster:
                    placement, nodes = cluster.placement("rank"), list[str]()
                    for node, bundle in zip(placement.nodes, placement.bundles, strict=True):
                        nodes += [node] * bundle.workers
                    RayVirtualCluster(engine_bundles(engines, cuda=True, nodes=nodes)).shutdown()
                return
            bundles = {"rank": ranks} if ranks else {}
            bundles |= engine_bundles(engines, cuda=has_gpus())
            RayVirtualCluster(bundles).shutdown()
        except ResourcesError as error:
            fields = "parallel and generation.num_replicas" if ranks else "generation.num_replicas"
            raise ResourcesError(f"{fields} must leave room for all: {error}") from None
        finally:
            release()

    def check_given(self, model: Any) -> None:
        require(
            model is None or not self.ranked,
            "model",
            f"must be a folder or a hub name, of which each of {self.plan.num_ranks} ranks loads a"
            " part",
            type(model).__name__,
            "save_pretrained() it, with its tokenizer, and name that folder",
        )


def _check_used(
    plan: ParallelPlan, runtime: RuntimeConfig, *, torchrun: bool, ranked: bool
) -> None:
    for section, name, used, purpose in (
        ("parallel", "cp_method", plan.cp > 1, "parallel.cp above 1"),
        ("parallel", "sequence_parallel", plan.tp > 1, "parallel.tp above 1"),
        ("parallel", "reduce_dtype", ranked, "gradients that several devices sum"),
        ("runtime", "tp_across_nodes", plan.tp > 1, "parallel.tp above 1"),
    ):
        if not used:
            config = plan if section == "parallel" else runtime
            refuse_unused(section, config, f"is for {purpose}", "remove it", names=[name])
    if torchrun:
        must = "is not for runs under torchrun, which starts the processes"
        remedy = "remove it; torchrun has --nproc-per-node and --max-restarts"
        names = ["max_restarts", "cpus_per_rank", "oversubscribe"]
        refuse_unused("runtime", runtime, must, remedy, names=names)
    if not ranked:
        remedy = "add a degree of parallel, or remove it"
        refuse_unused("runtime", runtime, "is for several ranks", remedy)


def _check_time(config: BaseConfig, *, ranked: bool) -> None:
    engines, limit = config.generation, config.runtime.timeout_s
    require(
        not (ranked and engines.traits.engines) or engines.timeout_s < limit,
        "generation.timeout_s",
        f"must be below runtime.timeout_s ({limit:g}) where ranks send the weights",
        engines.timeout_s,
        "lower it, or raise that one",
    )


def _check_groups(tp: int, environ: Mapping[str, str]) -> None:
    size, local_rank = environ.get("LOCAL_WORLD_SIZE"), environ.get("LOCAL_RANK")
    if size is None or local_rank is None:
        return
    first = int(environ["RANK"]) - int(local_rank)  # machines may have different numbers
    require(
        int(size) % tp == 0 and first % tp == 0,
        "parallel.tp",
        f"must divide the {size} processes of each machine, so that a group is on one",
        tp,
        "change it or --nproc-per-node, or let groups be on several machines"
        " (--runtime.tp-across-nodes)",
    )


def check_device(device: str | None, *, ranked: bool, has_gpus: bool) -> None:
    """Refuse a trainer.device that torch can't use."""
    if ranked:
        require(
            device in (None, "cpu", *["cuda"] * has_gpus),
            "trainer.device",
            f"must be cpu{' or cuda' * has_gpus} where the ranks have one each",
            device,
            "remove it; CUDA_VISIBLE_DEVICES says which GPUs are used",
        )
        return
    from nemorl.models.causal_lm import usable_device

    try:
        usable_device(device)
    except ValueError as error:
        raise ValueError(f"trainer.{error}") from error


def computes_on_accelerator(device: str | None, *, gpus: int, address: str | None) -> bool:
    """Return whether a trainer.device, or the best there is, is an accelerator."""
    import torch

    from nemorl.accelerator import is_accelerator

    if device is not None:
        return is_accelerator(torch.device(device))
    return gpus > 0 or (address is not None and _cluster_has_gpus(address))


def _check_size(num_ranks: int, runtime: RuntimeConfig, *, gpus: int) -> None:
    cores = os.cpu_count() or 1
    require(
        runtime.cpus_per_rank <= cores,
        "runtime.cpus_per_rank",
        f"must be at most the {cores} CPU cores of this machine",
        runtime.cpus_per_rank,
        "lower it",
    )
    if gpus:
        require(
            num_ranks <= gpus,
            "parallel",
            f"must ask for at most the {gpus} GPUs that this machine has",
            num_ranks,
            "lower a degree, use more machines (torchrun, or RAY_ADDRESS), or --trainer.device cpu",
        )
        return
    require(
        num_ranks * runtime.cpus_per_rank <= cores or runtime.oversubscribe,
        "parallel",
        f"must ask for at most as many ranks as the {cores} CPU cores of this machine can run,"
        f" with {runtime.cpus_per_rank} for each",
        num_ranks,
        "lower a degree, use more machines (torchrun, or RAY_ADDRESS), or let them take turns"
        " (--runtime.oversubscribe)",
    )


def this_machine() -> Machine:
    """Return this machine, where nothing trains."""
    return Machine(gpus=_num_gpus(), cluster=bool(os.environ.get("RAY_ADDRESS")))


def _cluster_has_gpus(address: str) -> bool:
    from nemorl.runtime.workers.cluster import connect, has_gpus, release

    connect(address)
    try:
        return has_gpus()
    finally:
        release()


def _num_gpus(device: str | None = None) -> int:
    import torch

    kind = (device or "cuda").partition(":")[0]
    try:
        module = torch.get_device_module("cuda" if kind == "cpu" else kind)
    except RuntimeError:
        return 0
    return module.device_count() if module.is_available() else 0


LARGE_CHUNK = 4096
"""`trainer.logprob_chunk` where there is room: the head's gradient is added to less often."""


@dataclass(frozen=True)
class Fit:
    """A run's step that fits on GPUs of `card` bytes, with what was chosen for it."""

    step: PlannedStep
    card: float
    micro_batch_tokens: int | None = None
    """trainer.micro_batch_tokens, if it is not left open."""

    def __str__(self) -> str:
        tokens = self.step.work.trainer.micro_batch_tokens
        sized = f" and microbatches of at most {tokens} tokens" * (tokens is not None)
        chunk = self.step.work.trainer.chunk
        chunked = f" and logits of {chunk} tokens at a time" * (chunk == LARGE_CHUNK)
        return (
            f"training is estimated to take {training_of(self.step) / GB:.1f} of each GPU's"
            f" {self.card / GB:.1f} GB, with parallel.activation_checkpointing"
            f" {self.step.plan.recomputes}{sized}{chunked}"
        )


def fitted(
    config: BaseConfig,
    devices: Devices,
    engines: GenerationConfig | None,
    model: Any,
    *,
    card: float | None,
) -> Fit | None:
    """Return a run's step with the largest default microbatch and the least recomputation that fit;
    None where sizes are unknown. What the user set stays.

    engines: those on the ranks' GPUs. card: bytes of the smallest GPU.
    Raises: ValueError where nothing fits that the user did not set.
    """
    registered, shape = isinstance(limits_of(config.trainer.backend), OwnLimits), None
    with suppress(Exception):  # transformers raises what a wrong value leads to
        shape = None if model is None else model_shape(model)
    if shape is None or card is None or (registered and engines is None):
        return None
    step = PlannedStep(shape, devices.plan, workload(config, devices, engines))
    check_states(step, card)
    room, trainer = card * (1 - step.work.reserve), step.work.trainer
    longest = max(config.longest_row, trainer.packed_row_tokens or 0)
    large = not (trainer.logprob_chunk or engines or devices.torchrun)
    tries = [*_tries(step, model, longest, chunks=[LARGE_CHUNK, None] if large else [None])]
    if devices.torchrun:  # where machines may have other GPUs, and all must cut alike
        tries = tries[:1]
    found = next((each for each in tries if training_of(each) <= room), tries[-1])
    given, chosen = trainer.micro_batch_tokens, found.work.trainer.micro_batch_tokens
    usual = max(MICRO_BATCH_TOKENS, longest)
    fit = Fit(found, card, chosen if given or chosen != usual else None)
    if (taken := training_of(found)) <= room:
        return fit
    own = given or trainer.train_micro_batch_size or step.plan.activation_checkpointing
    if taken <= card or own or devices.torchrun:
        warn(
            f"{fit}: if memory runs out, lower --trainer.micro-batch-tokens or add"
            " --parallel.activation-checkpointing full"
        )
        return fit
    raise ValueError(
        f"parallel must spread the model over GPUs that can train it, but {fit}, the least that can"
        f" be chosen: {smaller(step)}; or lower --data.max-total-sequence-length, or try it"
        f" nevertheless with --trainer.micro-batch-tokens {longest}"
    )


def _tries(
    step: PlannedStep, model: Any, longest: int, *, chunks: Sequence[int | None]
) -> Iterator[PlannedStep]:
    """Yield what may be chosen, the fastest first."""
    trainer, plans, tokens = step.work.trainer, [step.plan], MICRO_BATCH_TOKENS
    proofs = known(model) if limits_of(trainer.backend).traits.proves else ASSUMED
    if not step.plan.activation_checkpointing and proofs and proofs["recompute"].holds:
        plans.append(replace(step.plan, activation_checkpointing="full"))
    sizes = [max(tokens, longest)]
    while sizes[-1] > longest:
        sizes.append(max(longest, sizes[-1] // 2))
    given = trainer.micro_batch_tokens or trainer.train_micro_batch_size
    for plan in plans:
        for size in [trainer.micro_batch_tokens] if given else sizes:
            for chunk in chunks:
                chosen = replace(
                    trainer, micro_batch_tokens=size, logprob_chunk=chunk or trainer.logprob_chunk
                )
                yield replace(step, plan=plan, work=replace(step.work, trainer=chosen))


def sharing_of(
    fit: Fit | None,
    engines: GenerationConfig,
    model: Any,
    *,
    can_offload: bool,
    can_empty: bool,
) -> Sharing | None:
    """Return how engines share the GPUs of the ranks; None where sizes are unknown.

    can_offload, can_empty, Raises: as `sharing`.
    """
    given = engines.engine.get("gpu_memory_utilization")
    if fit is not None:
        return sharing(
            fit.step,
            card=fit.card,
            can_offload=can_offload and fit.step.can_offload,
            can_empty=can_empty,
            given=given,
            sleeps=engines.sleep_level != 0,
        )
    if model is not None and given is None:
        kind = getattr(model, "model_type", "the model")
        warn(
            f"the sizes of {kind} or of the GPUs are not known, so engines on the trainer's GPUs"
            " take vLLM's own share: if memory runs out, set"
            """ --generation.engine '{"gpu_memory_utilization": 0.4}'"""
        )
    return None


def workload(config: BaseConfig, devices: Devices, engines: GenerationConfig | None) -> PlanConfig:
    """Return a run's settings as `nemorl plan` has them."""
    sections = {name: getattr(config, name) for name in ("trainer", "optimizer", "lora")}
    engines = sections["generation"] = engines or GenerationConfig()
    for name, given in sections.items():
        usual = type(given)()
        sections[name] = replace(
            given, **{each: getattr(usual, each) for each in PlanConfig.unused[name]}
        )
    return PlanConfig(
        gpus=devices.plan.num_ranks * engines.devices_per_replica,
        seq_len=engines.max_model_len or config.longest_row,
        keep_reference=keeps_reference(config),
        **sections,
    )


def keeps_reference(config: BaseConfig) -> bool:
    """Return whether the trainer keeps the initial model."""
    needed = getattr(config, "needs_reference", False)
    return needed and getattr(config, "reference", "live") == "live"
