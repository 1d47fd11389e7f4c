"""`TrainingBackend` "megatron": a Hugging Face model on ranks of megatron-core.

Nothing of megatron-core is imported before `setup`, so that a process that only starts ranks does
without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemorl.checks import require
from nemorl.data.batch import TokenBatch
from nemorl.data.transfer import to_device
from nemorl.losses.logprobs import Logprobs
from nemorl.losses.types import Mean, Metrics, merge
from nemorl.models.adapters import live_tensors
from nemorl.models.causal_lm import load_causal_lm, on_meta
from nemorl.models.hub import CONFIG, loading
from nemorl.models.pretrained import weight_files, weights_folder
from nemorl.models.tensor_files import Piece, TensorFiles, require_shapes
from nemorl.parallel.accumulation import Accumulating
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.checkpoint import (
    CheckpointWriter,
    Contents,
    Saved,
    owned,
    shared_out,
    write_model_config,
)
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.determinism import deterministic_kernels
from nemorl.parallel.fingerprint import check_base, hash_of, sampled
from nemorl.parallel.head import RankInputs, planned
from nemorl.parallel.layout import Layout, cut
from nemorl.parallel.measure import StepMeter
from nemorl.parallel.megatron.engine import Engine, Order
from nemorl.parallel.megatron.limits import check, check_model
from nemorl.parallel.megatron.routing import (
    Load,
    balancing,
    copies_of,
    require_routes,
    routes_of,
)
from nemorl.parallel.megatron.weights import Shapes
from nemorl.parallel.profiling import close_profile, profile_folder
from nemorl.parallel.world import is_started_as_rank
from nemorl.rollout.generation import Completion

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, besides its number of steps."""


class MegatronBackend(Accumulating):
    """Trains the model that `setup` loads, spread as `config.parallel` says; a rank of several.

    All ranks make the same calls with the same whole batches, and each gets the whole result. The
    numbers, files and names are those of the dtensor backend, and either goes on with the other's
    checkpoints.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._given = model
        self._stages: Any = None
        self._reference: Any = None
        self._engine: Engine | None = None
        self._settings = ExitStack()
        self._writer: CheckpointWriter | None = None

    def setup(self, config: BackendConfig) -> None:
        self.config = config
        require(
            is_started_as_rank(),
            "trainer.backend",
            "megatron needs a process started as a rank",
            "megatron",
            "torchrun --nproc-per-node 1 starts one, and so does nemorl by itself",
        )
        from nemorl.parallel.megatron import mesh

        check(config)
        profile_folder(config.profile)
        if config.trainer.deterministic:
            self._settings.enter_context(deterministic_kernels())
        timeout = config.collective_timeout_s
        self.world = mesh.join(config.parallel, config.trainer.device, timeout_s=timeout)
        self.device = self.world.device
        self._load()
        self._base = self._fingerprint()
        if (initial := config.same_initial_model_as) is not None:
            check_base(Saved(initial, self.world).state["base"], self._base, initial)
        self._writer = CheckpointWriter(self.world)
        self.meter = StepMeter(self.model.config, self.device, self.world.size)
        self._forget()
        torch.manual_seed(config.seed)

    def _load(self) -> None:
        """Build this rank's stage and fill it from safetensors, or from a whole model on the CPU
        where that is given, has random weights, or is put together from adapters.
        """
        from nemorl.parallel.megatron.model import Stage
        from nemorl.parallel.megatron.optimizer import ShardedAdamW
        from nemorl.parallel.megatron.weights import Conversion, as_stored, mark_split

        config, path, given = self.config, self.config.model.path, self._given
        fresh = config.model.from_scratch
        trust: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
        folder = None if fresh or given is not None else weights_folder(path, **trust)
        trust["experts"] = True
        if folder is None and given is None:
            given = load_causal_lm(path, from_scratch=fresh, seed=config.seed, **trust)
        self._model = on_meta(str(folder) if given is None else given.config, **trust)
        hf = self._model.config
        check_model(hf, config.trainer)
        self.world.plan.check(hf, backend="megatron")
        stored_as = partial(as_stored, model_type=hf.model_type)
        self._tensors = stored_as(live_tensors(self._model))
        self._names = list(stored_as(self._model.state_dict()))
        shapes = {name: tuple(each.shape) for name, each in self._tensors.items()}
        self.conversion = Conversion(hf, shapes, self.world)
        if given is not None:
            read: Any = partial(_box, stored_as(given.state_dict()))
        else:
            assert folder is not None
            with loading(str(folder)):
                stored = TensorFiles(weight_files(folder))
                require_shapes(stored.shapes, shapes)
            read = stored.read
        with self._runtime():
            parts = range(self.world.plan.vpp)
            models = [
                nn.ModuleList(Stage(self._model, self.world, part) for part in parts)
                for _ in range(1 + config.keep_reference)
            ]
            for model in models:
                mark_split(model, self.conversion)
            self.optimizer = ShardedAdamW(models[0], config.optimizer, self.world)
        self._stages = models[0]
        self._fill(models, read)
        if config.keep_reference:
            self._reference = models[1].requires_grad_(False).eval()
        self._given = None

    @torch.no_grad()
    def _fill(self, models: list[nn.ModuleList], read: Any) -> None:
        """Copy this rank's part of whole tensors into models, of which the first one is trained."""
        entries = self.conversion.here
        for parameters in zip(*(model.named_parameters() for model in models), strict=True):
            value = self.conversion.own(entries[parameters[0][0]], read)
            for _, parameter in parameters:
                parameter.copy_(value)
            trained = parameters[0][1]
            if (span := self.optimizer.span(trained)) is not None:
                self.optimizer.main(trained).copy_(value.flatten()[span])

    def _fingerprint(self) -> str:
        samples = {name: sampled(tensor) for name, tensor in self.weights()}
        tied = samples["model.embed_tokens.weight"]
        return hash_of({name: samples.get(name, tied) for name in self._names})

    @property
    def model(self) -> Any:
        """The Hugging Face model on the meta device; the weights are megatron-core's."""
        if self._stages is None:
            raise RuntimeError(
                "the training backend has no model: call setup() first, and nothing after"
                " shutdown()"
            )
        return self._model

    def _gradients(self, batch: TokenBatch, loss_fn: LossFn) -> tuple[Metrics, Tensor]:
        coef = self.config.trainer.router_aux_loss_coef
        require(
            not (coef and self._batches),
            "trainer.router_aux_loss_coef",
            "must be 0 where gradients of several batches are added: its loss is of one",
            coef,
            "call optim_step() after each forward_backward(), with larger batches",
        )
        layout, pull = self._cut(batch), None
        if coef:
            load = self._load_of(layout)
            count = batch.num_tokens * self.model.config.num_hidden_layers
            balance, pull = load.loss(count), load.pull(count, coef=coef)
        self._stages.train()
        with balancing(self._stages, pull):
            outputs = self._schedule(self.optimizer.models, layout, "loss_mask", loss_fn)
        metrics: Metrics = {}
        loss = torch.zeros((), device=self.device)
        for output in outputs:
            metrics, loss = merge(metrics, output.metrics), loss + output.loss.detach()
        loss = self._from_last_stage(loss)
        if pull is None:
            return metrics, loss
        metrics = {**metrics, "router_aux_loss": Mean(balance, torch.tensor(1.0))}
        return metrics, loss + coef * balance

    def _load_of(self, layout: Layout) -> Load:
        """Return the load of the experts over a whole batch; a collective call."""
        hf = self.model.config
        sums = torch.zeros(2, hf.num_local_experts, dtype=torch.float64, device=self.device)
        load = Load(hf.num_experts_per_tok, sums)
        self._stages.eval()
        with balancing(self._stages, load):
            self._schedule(self._stages, layout, None)
        dist.all_reduce(sums)  # each rank had other tokens, or other layers
        return load

    def _schedule(
        self, stages: Any, layout: Layout, mask: str | None, loss_fn: LossFn | None = None
    ) -> list[Any]:
        """Take this rank's microbatches through the pipeline; return what the last stage finds of
        each: a loss, whose gradients are added, or without `loss_fn` the log-probabilities.

        stages: this rank's, one after the other.
        mask: the batch's mask of the tokens whose log-probability is computed, if any.
        """
        from nemorl.parallel.megatron.core import get_forward_backward_func

        parts, width = layout.parts(self.world.data_rank), self.model.config.hidden_size
        plan = self.world.plan
        if plan.vpp > 1:
            settings = getattr(stages[0], "module", stages[0]).config
            settings.microbatch_group_size_per_vp_stage = plan.microbatch_group(len(parts))
        vpp = plan.vpp if plan.vpp > 1 else None
        schedule = get_forward_backward_func(pp_size=plan.pp, vp_size=vpp)
        with self._runtime(), torch.set_grad_enabled(loss_fn is not None):
            return schedule(
                forward_step_func=partial(self._forward, mask, loss_fn),
                data_iterator=[iter(parts) for _ in stages],
                model=list(stages),
                num_microbatches=len(parts),
                seq_length=width,  # not used: stages send each other the shapes
                micro_batch_size=1,
                forward_only=loss_fn is None,
                collect_non_loss_data=loss_fn is None,
            )

    def _forward(
        self, mask: str | None, loss_fn: LossFn | None, parts: Iterator[TokenBatch], model: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """Compute a stage's share of the next microbatch; also return what the last stage does with
        it.
        """
        stage = getattr(model, "module", model)
        part, trainer = next(parts), self.config.trainer
        wanted = getattr(part, mask) if mask else torch.zeros_like(part.loss_mask)
        work = planned(part, wanted, self.world, share=trainer.share_prompts)
        first = stage.number == self.world.pp_rank
        self._copied += work.copied * (first and loss_fn is not None)
        routing = {"routes": routes_of(part, work, self.world, stage.number)}
        if trainer.router_aux_loss_coef:
            routing["copies"] = copies_of(part, work, self.world)
        part = replace(part, routed_experts=None)
        rows, work, routing = to_device((part, work, routing), self.device)
        chunk, with_entropy = trainer.logprob_chunk, loss_fn is not None
        inputs = RankInputs.of(rows, work, self.world, chunk=chunk, with_entropy=with_entropy)
        found = model(**inputs.values, **routing)
        if stage.post_process and not with_entropy:
            found = found[0]  # for mixtures of experts the schedule wants a tensor
        return found, partial(self._finish, inputs, rows, loss_fn)

    def _finish(
        self,
        inputs: RankInputs,
        rows: TokenBatch,
        loss_fn: LossFn | None,
        found: Any,
        non_loss_data: bool = False,
    ) -> Any:
        if loss_fn is None:
            return next(inputs.whole([found], rows))
        logprobs, entropy = inputs.whole(found, rows)
        output = loss_fn(ForwardOutput(logprobs, entropy), rows)
        # The schedule would divide by the tokens, and frees what it is given.
        no_tokens = torch.zeros((), dtype=torch.int, device=self.device)
        return output.loss.clone(), no_tokens, output

    def _from_last_stage(self, values: Tensor) -> Tensor:
        """Return the sum of the last stages' values over all rows, on all ranks."""
        if self.world.data_group is not None:
            dist.all_reduce(values, group=self.world.data_group)
        if (group := self.world.pp_group) is not None:
            last = dist.get_global_rank(group, self.world.plan.pp - 1)
            dist.broadcast(values, last, group=group)
        return values

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _grad_norm(self) -> Tensor:
        with self._runtime():
            return self.optimizer.reduce()

    def _update(self, grad_norm: Tensor, lr: float) -> None:
        with self._runtime():
            self.optimizer.step(grad_norm, lr)

    def get_logprobs(self, batch: TokenBatch) -> Logprobs:
        return self._logprobs(self._stages, batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Logprobs:
        if self._reference is None:
            raise RuntimeError(
                "no reference model is kept: set up the backend with keep_reference=True"
            )
        return self._logprobs(self._reference, batch)

    def _logprobs(self, stages: nn.ModuleList, batch: TokenBatch) -> Logprobs:
        stages.eval()
        # The reference model's routers choose by themselves: the sampler's were others.
        layout = self._cut(batch, replay=stages is self._stages)
        values = self._schedule(stages, layout, "response_mask")
        placed = torch.zeros(layout.rows.input_ids.shape, device=self.device)
        if values:
            placed = layout.place(values, self.world.data_rank)
        placed = self._from_last_stage(placed).to(batch.input_ids.device)
        return Logprobs(layout.restore(placed), batch.logprob_kind)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, gathered one by one: all ranks go through them together.

        dtype: cast to it before they are gathered.
        """
        parameters = dict(self._stages.named_parameters())
        yield from self.conversion.whole(
            lambda name: self._in_float32(parameters[name]), dtype or torch.float32
        )

    def open_engine(self, **options: Any) -> Shapes:
        """Make the engine that generates with these weights; return the weights' names and shapes.

        options: of `Decoding`.
        """
        records = self.config.trainer.router_replay
        self._engine = Engine(self._stages, self.world, records_experts=records, **options)
        return self.conversion.shapes

    def decode(self, order: Order) -> tuple[dict[int, list[Completion]], float]:
        """Have the engine do what is ordered; return the answers that are complete, and a pass's
        seconds.
        """
        if self._engine is None:
            raise RuntimeError("the ranks have no engine: call the generator's setup() first")
        with self._runtime():
            return self._engine.follow(order)

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Train and generate with these whole tensors from now on."""
        self._fill([self._stages], partial(_box, weights))

    def _in_float32(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter.detach()
        has_part = self.optimizer.span(parameter) is not None
        main = self.optimizer.main(parameter) if has_part else None
        return self.optimizer.gathered(parameter, main)

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """Write a folder that `transformers` loads, with the optimizer's state.

        Every other plan can resume from it, and the dtensor backend.

        background: write from a copy in main memory, and return at once.
        """
        assert self._writer is not None
        weights = {name: self._tensors[name] for name in self.conversion.order()}
        contents = Contents(weights, self.weights, self._moments(), self._write_config)
        state = {"step": self.step, "base": self._base}
        self._writer.save(contents, path, state=state, background=background)

    def _write_config(self, path: Path) -> None:
        write_model_config(self._model, path)

    def _moments(self) -> tuple[list[Piece], Iterable[Tensor]]:
        """Return this rank's share of AdamW's state, whole tensors under Hugging Face names."""
        if not self.step:
            return [], ()
        shapes = self.conversion.shapes
        owners = shared_out({name: prod(shape) for name, shape in shapes.items()}, self.world.size)
        own = [name for name in self.conversion.order() if owners[name] == self.world.rank]
        pieces = [
            Piece(f"{name}.{what}", torch.float32, shapes[name], (0,) * len(shapes[name]))
            for what in MOMENTS
            for name in own
        ]
        pieces += [Piece(f"{name}.step", torch.float32, (), ()) for name in own]
        moments = (self.conversion.whole(partial(self._moment, what)) for what in MOMENTS)
        steps = [torch.tensor(float(self.step))] * len(own)
        return pieces, chain(*(owned(each, own) for each in moments), steps)

    def _moment(self, what: str, name: str) -> Tensor:
        parameter = self._stages.get_parameter(name)
        return self.optimizer.gathered(parameter, self.optimizer.state(parameter).get(what))

    def wait_for_checkpoint(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint`, of any plan, or the dtensor backend wrote."""
        require(
            not (path / CONFIG).exists(),
            "the checkpoint",
            "must be of a whole model with trainer.backend megatron",
            path,
            "it has adapters: resume it with trainer.backend dtensor",
        )
        saved = Saved(path, self.world)
        if self.config.keep_reference:
            check_base(saved.state["base"], self._base, path)
        with self.world.share_errors():
            weights = saved.weights(self.conversion.shapes)
            moments = saved.optimizer(self.conversion.shapes)
            self._fill([self._stages], weights.read)
            self._fill_moments(moments)
        # The weights that the run began with, whatever this backend was set up with.
        self.step, self._base = saved.state["step"], saved.state["base"]

    def _fill_moments(self, stored: TensorFiles) -> None:
        """Copy this rank's spans out of stored ones."""
        saved = bool(stored.shapes)
        for name, parameter in self._stages.named_parameters():
            if (span := self.optimizer.span(parameter)) is None:
                continue
            state, entry = self.optimizer.state(parameter), self.conversion.here[name]
            state.clear()
            for what in MOMENTS if saved else ():
                value = self.conversion.own(entry, partial(_read_moment, stored, what))
                state[what] = value.flatten()[span].to(self.device, copy=True)
            if saved:
                state["step"] = stored.read(f"{entry.names[0]}.step").to(self.device, copy=True)

    def shutdown(self) -> None:
        close_profile()
        if self._writer is not None:
            self._writer.close()
        self._stages = self._reference = self._given = self._writer = self._engine = None
        vars(self).pop("optimizer", None)
        self._settings.close()

    def _cut(self, batch: TokenBatch, *, replay: bool = True) -> Layout:
        plan, trainer = self.world.plan, self.config.trainer
        if trainer.router_replay and replay:
            require_routes(batch, self.model.config)
        else:
            batch = replace(batch, routed_experts=None)
        return cut(
            batch,
            trainer,
            num_ranks=plan.data_ranks,
            multiple_of=plan.row_multiple,
            min_microbatches=plan.min_microbatches,
        )

    def _runtime(self) -> AbstractContextManager[None]:
        from nemorl.parallel.megatron.cpu import runtime

        return runtime(self.device)


def _box(
    tensors: dict[str, Tensor], name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    box = zip(offsets, shape, strict=True)
    return tensors[name][tuple(slice(first, first + size) for first, size in box)]


def _read_moment(stored: TensorFiles, what: str, name: str, *box: tuple[int, ...]) -> Tensor:
    return stored.read(f"{name}.{what}", *box)
