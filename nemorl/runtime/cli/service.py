"""`nemorl serve --tinker`: a service over the devices of this machine or a cluster."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemorl.checks import require
from nemorl.models.adapters import linear_layers
from nemorl.models.causal_lm import on_meta
from nemorl.models.hub import load_tokenizer, max_positions, model_folder
from nemorl.parallel.backend import TrainingBackend
from nemorl.parallel.backends import check_training, limits_of
from nemorl.parallel.config import LoRAConfig, OptimizerConfig
from nemorl.runtime.cli.settings import ServeConfig
from nemorl.runtime.config.base import BaseConfig, DataConfig, RunConfig
from nemorl.runtime.config.tree import dump_yaml
from nemorl.runtime.run import parts
from nemorl.runtime.run.devices import Devices
from nemorl.runtime.run.launch import Launch, changes, model_config_of
from nemorl.runtime.serve.endpoint import Endpoint
from nemorl.runtime.serve.tinker.routes import routes
from nemorl.runtime.serve.tinker.sampling import Engine
from nemorl.runtime.serve.tinker.service import Service
from nemorl.runtime.serve.tinker.training import ModelTrainer
from nemorl.runtime.serve.wire import Refused
from nemorl.runtime.store.directory import RunDirectory, locked
from nemorl.runtime.watch.log import recorded


@contextmanager
def trained(config: ServeConfig, options: Mapping[str, Any]) -> Iterator[Endpoint]:
    """Serve a model for training in the block. options: of the server."""
    ready: Service | None = None

    def service() -> Service:
        if ready is None:
            raise Refused("the model is being loaded: ask again", status=503)
        return ready

    with (
        locked(Path(config.dir)),
        closing(Endpoint(**options, routes=routes(service))) as endpoint,
        _service(config, endpoint) as found,
    ):
        endpoint.run(found.start())
        ready = found
        try:
            yield endpoint
        finally:
            ready = None
            endpoint.run(found.close())


@contextmanager
def _service(config: ServeConfig, endpoint: Endpoint) -> Iterator[Service]:
    stack = ExitStack()
    launch = _launch(config, stack)
    base, of_model = launch.config, launch.of_model
    outline = on_meta(of_model, trust_remote_code=config.model.trust_remote_code)
    numbers, layers = itertools.count(), {"train_attn": set[str](), "train_mlp": set[str]()}
    for name in linear_layers(outline):
        part = "train_attn" if "attn" in name or "attention" in name else "train_mlp"
        layers[part].add(name.rpartition(".")[2])
    with stack:
        backends = parts.Backends(launch, stack, generates=True)
        engines, in_turns = backends.engines, backends.in_turns
        assert engines is not None
        must = "must be false for a service with ranks, which start after its engines"
        apart = not (launch.devices.placed and backends.share_gpus)
        require(apart, "generation.colocated", must, True, "add --generation.no-colocated")
        source = parts.engine_source(launch.devices, engines.traits, outline)
        generator = stack.enter_context(parts.live_engine(backends, engines, model=source))

        @contextmanager
        def opened(lora: LoRAConfig, seed: int) -> Iterator[TrainingBackend]:
            name = f"model_{next(numbers)}"
            setup = replace(parts.base_setup(backends, None), lora=lora, seed=seed)
            check_training(setup, of_model, setup.parallel, limits_of(base.trainer.backend))
            try:
                yield backends.add(name, setup, None, own_ranks=False, live=None)
            finally:
                backends.drop(name)

        def wake() -> None:
            if in_turns:
                backends.make_room(backends.trained.values())
                generator.wake()

        root, tokenizer = launch.directory.path, Path(config.model.tokenizer or launch.folder)
        trainer = ModelTrainer(
            root=root,
            open=opened,
            layers=layers,
            tokenizer=launch.tokenizer,
            vocab_size=of_model.vocab_size,
            longest=base.data.max_total_sequence_length,
            begin=generator.sleep if in_turns else lambda: None,
            count=lambda kind, tokens: endpoint.traffic.tokens.labels(kind).inc(tokens),
            device=asyncio.Lock() if in_turns else nullcontext(),
        )
        yield Service(
            root=root,
            model=config.name or config.model.path,
            tokenizer=str(tokenizer.resolve() if tokenizer.exists() else tokenizer),
            trainer=trainer,
            engine=Engine(generator=generator, trainer=trainer, base=launch.folder, wake=wake),
        )


def _launch(config: ServeConfig, stack: ExitStack) -> Launch:
    """Return what a run would have read and checked, of no data."""
    folder, trust = model_folder(config.model.path), config.model.trust_remote_code
    of_model = model_config_of(folder, trust_remote_code=trust)
    known, remedy = of_model is not None, "name a folder or a hub name"
    require(known, "model.path", "must have a readable config", config.model.path, remedy)
    given = (max_positions(of_model), config.generation.max_model_len)
    base = BaseConfig(
        model=config.model,
        data=DataConfig(max_total_sequence_length=min(x for x in (*given, 1 << 20) if x)),
        trainer=config.trainer,
        optimizer=OptimizerConfig(max_grad_norm=None),
        parallel=config.parallel,
        generation=config.generation,
        run=RunConfig(dir=config.dir, resume="auto", display="none"),
    )
    devices = Devices.of(base)
    require(not devices.torchrun, "parallel", "must be placed by Ray", "torchrun", "use nemorl")
    devices.check_model(of_model)
    base = devices.config
    directory = RunDirectory(Path(config.dir))
    if directory.config.exists():
        other = [x for x in changes(directory.config, base) if x.startswith("model.")]
        must, remedy = "must be of the model that is served", "name another, or serve that one"
        require(not other, "dir", must, "; ".join(other), remedy)
    directory = RunDirectory.create(config.dir, dump_yaml(base), resume="auto")
    return Launch(
        config=base,
        devices=devices,
        directory=directory,
        folder=folder,
        model=None,
        of_model=of_model,
        tokenizer=load_tokenizer(config.model.tokenizer or folder, trust_remote_code=trust),
        environment=None,
        rows=(),
        data=(),
        validation_rows=(),
        log=stack.enter_context(recorded(directory, algorithm="tinker")),
        loggers={},
        callbacks=(),
    )
