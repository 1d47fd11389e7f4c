"""`open_run`, for a loop of one's own, and `run`, for one that has a name."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from nemorl.checks import warn
from nemorl.rollout.calls import exit_is_error
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.ranks import is_follower
from nemorl.runtime.ranks.trainer import RankedTrainer
from nemorl.runtime.run.launch import Config, Launch, launched
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.registry import algorithm_of, loop_of, training_backend_class
from nemorl.runtime.run.saving import TrainResult, final_metrics
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import script_with
from nemorl.runtime.store.files import WorkerDied, WorkerTimeout
from nemorl.runtime.watch.log import event


@contextmanager
def open_run(
    config: Config,
    *,
    generates: bool | None = None,
    num_updates: int | None = None,
    **given: Any,
) -> Iterator[Run[Config]]:
    """Open the run in the folder `config.run.dir`, for a training loop in the block.

    With `config.run.resume` all is as the run's last checkpoint left it: a killed loop goes on with
    the numbers that it would have had. A loaded `model` and `tokenizer`, rows (`train`,
    `validation`), a `reward`, an `environment` and `callbacks` may be given. The model is loaded
    with the first step, or when `run.trainer` is used.

    generates: whether the run samples. None: as the config says; SFT does where it validates on
        questions, DPO does not.
    num_updates: optimizer steps of the whole run, for the schedule of the learning rate. None: as
        the config says.

    Under torchrun the block runs in rank 0; the others serve it here and exit with it.

    Raises ValueError that names the field, where possible before the model is loaded::

        with open_run(SFTConfig(...)) as run:
            for step in run.steps(100):
                step.train(next_batch(), loss_fn)
    """
    if is_follower():
        _follow(config)
        raise SystemExit(0)
    with (
        launched(config, script_with(type(config)), **given) as launch,
        opened(launch, generates=generates, num_updates=num_updates) as run,
    ):
        yield run


def run(config: BaseConfig, **given: Any) -> TrainResult:
    """Run the algorithm of `config` in the folder `config.run.dir`, and return its result.

    Takes and raises what `open_run` does. A resumed run does not repeat a validation that failed.
    After ranks have died or hung, the run begins up to `runtime.max_restarts` times again, with new
    ranks and from the last checkpoint; the callbacks see all attempts.

    The loop, the callbacks and the reward are in this process. Under torchrun it is rank 0's; the
    others serve it, and return the same result without the model.
    """
    loop = loop_of(config)
    if is_follower():
        return _follow(config)
    generators, restart = checkpoint.RandomState.now(), 0
    with launched(config, algorithm_of(config), **given) as launch:
        config = launch.config
        while True:
            try:
                own = "a loss, an advantage, a backend or a loop of your own"
                with opened(launch) as live, exit_is_error(own):
                    loop(live)
                assert live.result is not None
                return live.result
            except Exception as error:
                failure, restart = failed_ranks(error), restart + 1
                if failure is None or restart > config.runtime.max_restarts:
                    raise
                reason = str(failure)
            point = checkpoint.latest(launch.directory.path)
            where = f"restarts from {point}" if point else "starts again, without a checkpoint yet,"
            times = f"restart {restart} of {config.runtime.max_restarts}"
            event("restart", times, restart=restart)
            warn(f"the run {where} with new ranks ({times}): {reason}")
            generators.restore()
            resume = point is not None or config.run.resume
            launch = replace(launch, config=replace(config, run=replace(config.run, resume=resume)))


@contextmanager
def opened(launch: Launch, **options: Any) -> Iterator[Run[Any]]:
    """Open a launched run for the block. options: as of `open_run`."""
    with ExitStack() as stack:
        run = Run[Any](launch, stack, **options)
        try:
            yield run
            if run.loop is not None:
                run.loop.finish()
        except BaseException as error:
            cause = run.fail(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            run.close()
        history, model = launch.directory.read_metrics(), None
        if run.live is not None and not launch.devices.ranked:
            model = getattr(run.live.trainer, "model", None)
        metrics = final_metrics(history)
        run.result = TrainResult(metrics, history, launch.directory, model, launch.tokenizer)
        if launch.devices.torchrun and run.live is not None:
            assert isinstance(run.live.trainer, RankedTrainer)
            run.live.trainer.result = run.result


def failed_ranks(error: BaseException | None) -> WorkerDied | WorkerTimeout | None:
    """Return the failure of ranks that an error comes from, if any."""
    while error is not None and not isinstance(error, WorkerDied | WorkerTimeout):
        error = error.__cause__
    return error


def _follow(config: BaseConfig) -> TrainResult:
    from nemorl.runtime.ranks.rank import follow

    return follow(training_backend_class(config.trainer.backend), config)
