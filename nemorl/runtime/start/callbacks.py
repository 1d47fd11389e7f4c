"""The callbacks of a run: what shows, records, saves and exports it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nemorl.runtime.config.grpo import GapConfig
from nemorl.runtime.config.tree import to_dict
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.saving import CheckpointCallback, EarlyStop, ExportCallback
from nemorl.runtime.start.backends import has_method
from nemorl.runtime.start.launch import Launch
from nemorl.runtime.store.state import POLICY
from nemorl.runtime.watch.alerts import GapWatch, SignalWatch
from nemorl.runtime.watch.display import make_display
from nemorl.runtime.watch.loggers.base import LoggedRun, Recorder
from nemorl.runtime.watch.resources import ResourceMeter
from nemorl.warn import warn


def exported(launch: Launch, backends: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the models of backends that can export their weights, by name."""
    models = {name: getattr(each, "model", None) for name, each in backends.items()}
    return {
        name: model
        for name, model in models.items()
        if model is not None and has_method(launch, backends[name], "weights")
    }


def own_callbacks(
    launch: Launch, models: Mapping[str, nn.Module]
) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that show and record, and the ones that save, which come last: a
    checkpoint covers all that was recorded before it.

    models: to export at the end, by name.
    """
    config, directory = launch.config, launch.directory
    logged = LoggedRun(
        directory=directory,
        run_id=launch.log.record.run_id,
        config=to_dict(config),
        project=config.run.project,
        samples_per_step=config.run.samples_per_step,
    )
    before: list[Callback] = [
        ResourceMeter(),
        make_display(config.run.display, total_steps=launch.log.total_steps),
        Recorder(launch.loggers, logged),
        SignalWatch(),
    ]
    after: list[Callback] = []
    if condition := config.run.stop_condition():
        after.append(EarlyStop(condition, directory, quiet=launch.quiet))
    after.append(
        CheckpointCallback(
            directory,
            period=config.run.save_period,
            keep=config.run.keep_checkpoints,
            ranking=config.run.ranking(),
            observers=(launch.log, *launch.callbacks, *before),
            background=config.run.async_save,
        )
    )
    if isinstance(gap := getattr(config, "gap", None), GapConfig):
        after.append(GapWatch(gap, directory))
    if config.run.export and POLICY not in models:
        warn(
            f"{directory.hf} will not be written, because the training backend"
            f" {config.trainer.backend!r} has no attribute model or no weights to export"
        )
    elif config.run.export:
        after.append(ExportCallback(directory, models, adapter=config.lora.export == "adapter"))
    if config.run.plots:
        from nemorl.runtime.watch.plots import PlotCallback  # slow to import

        after.append(PlotCallback(directory))
    return before, after
