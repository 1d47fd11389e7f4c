"""What a run's parts are set up with, worked out from its configuration and its model, and what
differs between two of its configurations.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import require
from nemorl.models.adapters import CONFIG, base_of
from nemorl.parallel.config import BackendConfig, ProfileConfig
from nemorl.parallel.profiling import profile_folder
from nemorl.rollout.environment import EnvironmentInterface
from nemorl.rollout.environments import make_environment
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.config.tree import flat, load_config, to_dict
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.job import Job, Reward, Rows
from nemorl.runtime.start.devices import Devices


def as_given(config: Any, *, train: Rows, validation: Rows, reward: Reward | None) -> Any:
    """The config with the names of what was given beside it, so that config.yaml tells them and a
    resume from a shell finds them.

    A reward that has no name is noted as given in Python: a resume without it is an error, rather
    than another reward.
    """

    def named(value: Any) -> Any:
        several = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
        parts = list(value) if several else [value]
        if not all(isinstance(part, str | Path) for part in parts):
            return None
        return tuple(map(str, parts)) if several else str(value)

    data = {
        name: named(rows)
        for name, rows in (("train", train), ("validation", validation))
        if named(rows) is not None
    }
    config = replace(config, data=replace(config.data, **data)) if data else config
    if reward is not None and hasattr(config, "reward"):
        parts = (
            list(reward)
            if isinstance(reward, Mapping | list | tuple)
            else [getattr(reward, "__name__", type(reward).__name__)]
        )
        config = replace(
            config,
            reward=named(reward)
            or f"given in Python ({', '.join(getattr(p, '__name__', None) or str(p) for p in parts)})",
        )
    return config


def model_config_of(model: nn.Module | str) -> Any:
    """The Hugging Face configuration of a model, or of the one that a folder or hub name means;
    None where loading it will say what is wrong.
    """
    from transformers import AutoConfig

    if not isinstance(model, str):
        return model.config
    try:
        name = (base_of(Path(model)) or "") if (Path(model) / CONFIG).is_file() else model
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError):
        return None


def within_positions(config: Any, of_model: Any) -> Any:
    """The config with data.max_total_sequence_length lowered, with a warning, to the positions that
    the model has.
    """
    positions, wanted = (
        getattr(of_model, "max_position_embeddings", None),
        config.data.max_total_sequence_length,
    )
    if positions is None or wanted <= positions:
        return config
    warnings.warn(
        f"data.max_total_sequence_length is lowered from {wanted} to {positions}, the positions"
        " that the model has",
        stacklevel=3,
    )
    return replace(config, data=replace(config.data, max_total_sequence_length=positions))


def with_response_length(config: Any) -> tuple[Any, str | None]:
    """The config with generation.max_new_tokens as a number that leaves room for a prompt, and what
    to say where that is less than the usual one.

    A number that was given stays; it is refused where it does not fit. Nothing is set for an
    algorithm without rewards, which samples nothing.
    """
    if config.generation.max_new_tokens is not None or not hasattr(config, "reward"):
        return config, None
    usual, longest = config.generation.longest_response, config.data.max_total_sequence_length
    fits = min(usual, max(1, longest // 2))
    said = (
        f"generation.max_new_tokens is {fits} instead of {usual}: half of"
        f" data.max_total_sequence_length ({longest}), as it was not given"
    )
    return replace(config, generation=replace(config.generation, max_new_tokens=fits)), (
        said if fits < usual else None
    )


def environment_of(config: BaseConfig, reward: Reward | None) -> EnvironmentInterface | None:
    """The reward given, or that which the config names; None for an algorithm that has no reward."""
    if not hasattr(config, "reward"):
        if reward is not None:
            raise ValueError(
                f"reward can't be given here, because {type(config).__name__} has none: leave"
                " it out"
            )
        return None
    return make_environment(
        config.reward if reward is None else reward, getattr(config, "reward_weights", ())
    )


def backend_config(
    config: BaseConfig,
    job: Job,
    folder: str,
    found: Path | None,
    *,
    devices: Devices,
    directory: RunDirectory,
) -> BackendConfig:
    """What the training backend is set up with, where the run goes on from the checkpoint `found`."""
    needs_initial_model = job.keep_reference or job.with_initial_model is not None
    return BackendConfig(
        model=replace(config.model, path=folder),
        trainer=config.trainer,
        optimizer=config.optimizer,
        seed=config.run.seed,
        lora=config.lora,
        parallel=devices.plan,
        profile=profile_config(
            config.profile, directory, total_steps=job.num_updates or job.num_steps
        ),
        total_steps=job.num_updates or job.num_steps,
        keep_reference=job.keep_reference,
        collective_timeout_s=max(config.runtime.timeout_s, config.runtime.start_timeout_s)
        + 60,  # those who watch the ranks speak first
        same_initial_model_as=(
            found / "trainer" if found is not None and needs_initial_model else None
        ),
    )


def profile_config(
    profile: ProfileConfig, directory: RunDirectory, *, total_steps: int
) -> ProfileConfig:
    """What is recorded, in profile/ of the run unless another folder was given.

    Raises ValueError where nothing would be, or could be written.
    """
    span = profile.span()
    if span is None:
        return profile
    require(span[0] <= total_steps, "profile.steps", f"must begin within the {total_steps} optimizer steps of the run", profile.steps,
            "name steps that there are")  # fmt: skip
    profile = replace(profile, dir=profile.dir or str(directory.path / "profile"))
    profile_folder(profile)
    return profile


def generation_config(
    config: BaseConfig, directory: RunDirectory, devices: Devices
) -> GenerationConfig:
    """What an engine is set up with: the replicas' place for logs, the GPUs that they leave to the
    trainer, and the longest sequence are the run's, unless they were given.

    Raises ValueError where the engine's longest sequence is shorter than the run's.
    """
    given = config.generation
    if given.backend == "torch":
        return given
    longest = config.data.max_total_sequence_length
    fits = given.max_model_len is None or given.max_model_len >= longest
    require(fits, "generation.max_model_len", f"must be at least data.max_total_sequence_length ({longest})", given.max_model_len,
            "lower that one, or leave this one out")  # fmt: skip
    given = replace(given, max_model_len=given.max_model_len or longest)
    if not given.num_replicas:
        return given
    gpus = devices.local_gpus if given.trainer_gpus is None else given.trainer_gpus
    return replace(given, log_dir=given.log_dir or str(directory.path / "logs"), trainer_gpus=gpus)


def probe(config: BaseConfig, model: Any) -> list[int]:
    """A prompt for `check_agreement`: any tokens do, as long as they leave room for an answer."""
    return [
        token % model.config.vocab_size
        for token in range(max(1, min(8, config.data.max_total_sequence_length // 2)))
    ]


def changes(path: str | Path, config: Any) -> list[str]:
    """In which settings a config differs from the one in a file, but for how long it goes on and
    those that no number depends on.

    A file that can't be read is a warning.
    """
    try:
        before, now = flat(to_dict(load_config(type(config), path))), flat(to_dict(config))
    except ValueError as error:
        warnings.warn(
            "the settings that the run had so far can't be compared with the present ones:"
            f" {error}",
            stacklevel=4,
        )
        return []
    free = ("run.", "runtime.", "profile.")
    keys = [
        key
        for key in now | before
        if not key.startswith(free) and key not in ("max_num_steps", "num_epochs")
    ]
    return [
        f"{key} is {now.get(key)!r}, was {before.get(key)!r}"
        for key in keys
        if now.get(key) != before.get(key)
    ]


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which data sets differ between two contents of data.json; nothing where the earlier one is
    missing.

    >>> data_changes({"train": {"count": 40, "total_tokens": 200, "hash": "a"}}, {"train": {"count": 77, "total_tokens": 385, "hash": "b"}})
    ['train is 77 sequences of 385 tokens in all (hash b), was 40 sequences of 200 tokens in all (hash a)']
    """

    def told(found: Mapping[str, Any] | None) -> str:
        return (
            "none"
            if found is None
            else (
                f"{found.get('count')} sequences of {found.get('total_tokens')} tokens in all (hash"
                f" {found.get('hash')})"
            )
        )

    names = [name for name in dict.fromkeys([*now, *before]) if before]
    return [
        f"{name} is {told(now.get(name))}, was {told(before.get(name))}"
        for name in names
        if told(now.get(name)) != told(before.get(name))
    ]
