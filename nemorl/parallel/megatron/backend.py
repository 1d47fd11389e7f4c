"""`TrainingBackend` "megatron": a Hugging Face model on ranks of megatron-core.

megatron-core is imported by `setup`: a process that only starts ranks does without.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.checks import require
from nemorl.losses.types import Mean, Metrics, Needs, merge
from nemorl.models.adapters import live_tensors
from nemorl.models.causal_lm import check_files, fresh_head, is_scalar, warn_of_unused
from nemorl.models.hub import loading, weight_files
from nemorl.models.tensor_files import TensorFiles, as_stored, sampled, shapes_of, stored_names
from nemorl.parallel.accumulation import Accumulating, outline_of, storage_of
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.backends import check_training
from nemorl.parallel.checkpoint import Contents, Saved, shared_out, write_model_config
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.experts import require_one_batch
from nemorl.parallel.fingerprint import hash_of, samples_of
from nemorl.parallel.layout import Cutting, Layout
from nemorl.parallel.megatron import limits
from nemorl.parallel.megatron.engine import MegatronEngine, Order
from nemorl.parallel.megatron.routing import balancing
from nemorl.parallel.megatron.weights import (
    Shapes,
    fill_moments,
    own_boxes,
    own_moments,
    own_weights,
)
from nemorl.parallel.world import DTYPES, World, is_started_as_rank
from nemorl.rollout.generation import Completion


class MegatronBackend(Accumulating):
    """Trains the model that `setup` loads, spread as `config.parallel` says; a rank of several.

    Numbers, files and names are the dtensor backend's, and either resumes the other's checkpoints.
    """

    traits, check = limits.traits, staticmethod(limits.check)

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self._stages: Any = None
        self._reference: Any = None
        self._engine: MegatronEngine | None = None

    def _load(self) -> None:
        require(
            is_started_as_rank(),
            "trainer.backend",
            "megatron needs a process started as a rank",
            "megatron",
            "torchrun --nproc-per-node 1 starts one, and so does nemorl by itself",
        )
        from nemorl.parallel.megatron import core
        from nemorl.parallel.megatron.model import Stage
        from nemorl.parallel.megatron.optimizer import ShardedAdamW
        from nemorl.parallel.megatron.pipeline import Pipeline
        from nemorl.parallel.megatron.weights import Conversion, mark_split

        config = self.config
        self.world = core.join(
            config.parallel, config.trainer.device, timeout_s=config.collective_timeout_s
        )
        self.device = self.world.device
        self._runtime = partial(core.runtime, self.device)
        source = source_of(config, self._given)
        if self.world.rank == 0:
            warn_of_unused(source.unused)
        self._model = source.model
        hf = self._model.config
        check_training(config, hf, self.world.plan, limits)
        self._pipeline = Pipeline(self.world, config.trainer, hf)
        self.conversion = Conversion(hf, source.shapes, self.world)
        with self._runtime():
            parts = range(self.world.plan.vpp)
            models = [
                nn.ModuleList(Stage(self._model, self.world, part) for part in parts)
                for _ in range(1 + config.keep_reference)
            ]
            for model in models:
                mark_split(model, self.conversion)
            if config.trains:
                self.optimizer = ShardedAdamW(models[0], config.optimizer, self.world)
        self._stages = models[0].requires_grad_(config.trains)
        _fill(self, models, source.read)
        if config.keep_reference:
            self._reference = models[1].requires_grad_(False).eval()
        self._given = None
        if config.trains or config.same_initial_model_as is not None:
            self._base = source.fingerprint(self.world)

    @property
    def model(self) -> Any:
        """The Hugging Face model on the meta device; the weights are megatron-core's."""
        return self._loaded()

    @property
    def cutting(self) -> Cutting:
        hf, trainer = self.model.config, self.config.trainer
        return Cutting(trainer=trainer, plan=self.world.plan, model=hf, layers=hf.num_hidden_layers)

    def _gradients(self, layout: Layout, loss_fn: LossFn, needs: Needs) -> tuple[Metrics, Tensor]:
        coef, pull = require_one_batch(self.config.trainer, self._batches), None
        if coef:
            load = self._pipeline.load(self._stages, layout, needs)
            count = layout.rows.num_tokens * self.model.config.num_hidden_layers
            balance, pull = load.loss(count), load.pull(count, coef=coef)
        self._stages.train()
        with balancing(self._stages, pull), self.optimizer.adding(last=self._is_whole):
            outputs = self._pipeline.run(self.optimizer.models, layout, "loss_mask", needs, loss_fn)
        self._copied += self._pipeline.copied
        metrics: Metrics = {}
        loss = torch.zeros((), device=self.device)
        for output in outputs:
            metrics, loss = merge(metrics, output.metrics), loss + output.loss.detach()
        loss = self.world.total(loss)
        if pull is None:
            return metrics, loss
        metrics = {**metrics, "router_aux_loss": Mean(balance, torch.tensor(1.0))}
        return metrics, loss + coef * balance

    def _held(self, *, keep_weights: bool) -> Iterator[Tensor]:
        parameters = [each for _, each in self._parameters(self._stages)]
        weights = {storage_of(each) for each in parameters}  # in float32 AdamW updates these
        if self._reference is not None:
            yield from self._reference.parameters()
        if self.optimizer is not None:
            yield from (each for each in self.optimizer.held() if storage_of(each) not in weights)
        if not keep_weights:
            yield from parameters

    def _grad_norm(self) -> Tensor:
        with self._runtime():
            return self.optimizer.reduce()

    def _update(self, grad_norm: Tensor, limit: float) -> None:
        with self._runtime():
            self.optimizer.step(grad_norm, limit)

    def _outputs(self, layout: Layout, needs: Needs, *, reference: bool) -> list[ForwardOutput]:
        stages = self._reference if reference else self._stages
        stages.eval()
        return self._pipeline.run(stages, layout, "response_mask", needs)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, gathered one by one: all ranks go through them together."""
        parameters, dtype = dict(self._parameters(self._stages)), dtype or torch.float32

        def own(name: str) -> Tensor:
            part = parameters[name]  # of the same type it takes no other data parallel rank
            return self._away.present(part) if part.dtype == dtype else _in_float32(self, part)

        yield from self.conversion.whole(own, dtype)

    def open_engine(self, **options: Any) -> Shapes:
        """Make the engine that generates with these weights, and return their names and shapes.

        options: of `Decoding`.
        """
        records = self.config.trainer.router_replay
        self._engine = MegatronEngine(self._stages, self.world, records_experts=records, **options)
        return self.conversion.shapes

    def decode(self, order: Order) -> tuple[dict[int, list[Completion]], float]:
        """Have the engine do what is ordered, as `MegatronEngine.follow`."""
        if self._engine is None:
            raise RuntimeError("the ranks have no engine: call the generator's setup() first")
        if next(self._stages.parameters()) in self._away:
            self._away.restore()
        with self._runtime():
            return self._engine.follow(order)

    def take_weights(self, weights: dict[str, Tensor], version: int) -> dict[str, Tensor]:
        """Take whole tensors to train and generate with, and return a sample of their numbers."""
        self._away.restore()
        _fill(self, [self._stages], partial(_box, weights))
        held = self.weights(DTYPES[self.world.plan.precision])
        return {name: sampled(tensor, version).cpu() for name, tensor in held}

    def _contents(self) -> Contents:
        boxes = own_boxes(self._stages, self.optimizer, self.conversion)
        return Contents(
            weights=own_weights(boxes, self.optimizer),
            optimizer=own_moments(boxes, self.optimizer, self.step),
            write_config=partial(write_model_config, self._model),
        )

    def _restore(self, saved: Saved) -> None:
        weights = saved.weights(self.conversion.shapes)
        stored = saved.optimizer(self.conversion.shapes)
        _fill(self, [self._stages], weights.read)
        fill_moments(self._stages, self.optimizer, self.conversion, stored, self.device)

    def shutdown(self) -> None:
        super().shutdown()
        self._stages = self._reference = self._writer = self._engine = None

    def _parameters(self, stages: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if self.optimizer is not None:
            self.optimizer.wait()
        return stages.named_parameters()


@torch.no_grad()
def _fill(backend: MegatronBackend, models: list[nn.ModuleList], read: Any) -> None:
    conversion, optimizer = backend.conversion, backend.optimizer
    for parameters in zip(*map(backend._parameters, models), strict=True):
        name, trained = parameters[0]
        value = conversion.own(conversion.here[name], read)
        for _, parameter in parameters:
            parameter.copy_(value)
        if optimizer and (span := optimizer.span(trained)) is not None:
            optimizer.main(trained).copy_(value.flatten()[span])


def _in_float32(backend: MegatronBackend, parameter: nn.Parameter) -> Tensor:
    optimizer, present = backend.optimizer, backend._away.present
    if parameter.dtype == torch.float32 or optimizer is None:
        return present(parameter).detach().float()
    if optimizer.span(parameter) is None:
        return optimizer.gathered(parameter, None)
    return optimizer.gathered(parameter, present(optimizer.main(parameter)))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model as its files or its owner have it."""

    model: Any
    shapes: Shapes
    """Of its parameters, tied ones once, by their names in files."""
    names: list[str]
    read: Any
    """`read(name, offsets, shape)` returns a part of a tensor."""
    unused: Iterable[str] = ()
    """Names of tensors in its files that it does not use."""

    def fingerprint(self, world: World) -> str:
        """A collective call: each rank reads some tensors."""
        shapes = self.shapes
        owners = shared_out({name: prod(shape) for name, shape in shapes.items()}, world.size)
        boxes = (
            (name, self.read(name, (0,) * len(shape), shape), (0,) * len(shape))
            for name, shape in shapes.items()
            if owners[name] == world.rank
        )
        samples = samples_of(shapes, boxes, world)
        tied = samples["model.embed_tokens.weight"]
        return hash_of({name: samples.get(name, tied) for name in self.names})


def source_of(config: BackendConfig, given: Any) -> Source:
    """Return where weights come from: safetensors, maybe with a fresh head, or a whole model."""
    model, given, folder = outline_of(config, given)
    stored = stored_names(model)
    shapes = shapes_of(live_tensors(model), stored)
    names = [name for name, _ in as_stored(model.state_dict().items(), stored)]
    source = partial(Source, model=model, shapes=shapes, names=names)
    if given is not None:
        tensors = dict(as_stored(given.state_dict().items(), stored))
        return source(read=partial(_box, tensors))
    assert folder is not None
    with loading(str(folder)):
        files = TensorFiles(weight_files(folder))
        head = fresh_head(model.config, seed=config.seed) if is_scalar(model) else {}
        fresh = {name: head[name] for name in head.keys() - files.shapes.keys()}

        def read(name: str, *box: tuple[int, ...]) -> Tensor:
            return _box(fresh, name, *box) if name in fresh else files.read(name, *box)

        known = files.shapes | {name: shapes[name] for name in fresh}
        return source(read=read, unused=check_files(model, known, shapes))


def _box(
    tensors: Mapping[str, Tensor], name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    box = zip(offsets, shape, strict=True)
    return tensors[name][tuple(slice(first, first + size) for first, size in box)]
