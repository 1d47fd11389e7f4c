"""Training in a few lines of Python: `nemorl.train`, and a trainer class for each algorithm."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from nemorl.checks import require, short
from nemorl.models.hub import load_tokenizer
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.flags import MAIN
from nemorl.runtime.config.grpo import of_preset
from nemorl.runtime.config.spellings import advice
from nemorl.runtime.config.tree import (
    construct,
    flat,
    key_of,
    keys_named,
    layer,
    leaves,
    own_sections,
    to_dict,
)
from nemorl.runtime.config.yaml_io import ConfigError, without_secrets
from nemorl.runtime.run.data import Reward, Rows
from nemorl.runtime.run.open_run import run
from nemorl.runtime.run.registry import get_algorithm
from nemorl.runtime.run.saving import TrainResult
from nemorl.runtime.watch.callbacks import Callback
from nemorl.runtime.watch.log import changed_settings

ARGUMENTS = {
    "model.path": "model",
    "model.tokenizer": "tokenizer",
    "data.train": "dataset",
    "data.validation": "validation",
    "reward": "reward_fn",
}
"""Settings that are arguments of `train` by another name."""


def train(
    model: str | Path | nn.Module,
    dataset: Rows,
    reward_fn: Reward | None = None,
    *,
    algorithm: str = "grpo",
    tokenizer: Any = None,
    validation: Rows = None,
    environment_factory: Any = None,
    callbacks: Sequence[Callback] = (),
    preset: str | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train a model on a data set by an algorithm.

    - `model`: a folder, a hub name, or a loaded Hugging Face model (with `tokenizer`, unless it
      knows where it came from)
    - `dataset`, `validation`: a file, a hub name, a list of dicts, a datasets.Dataset, a
      DataModule, or several of them
    - `reward_fn` (or `reward`): fn(prompt, response) -> float, fn(prompts, responses) -> list of
      floats, either with columns of the data, the name of a reward, an environment, or several in a
      list, which are added up. A class with `step(response)` leads conversations itself
    - `environment_factory`: a class with tools (docs/environments.md); `reward_fn` judges. It or
      `reward_fn` may be a mapping, from which each row chooses by its column `environment`
    - `algorithm`: "grpo", "sft", "dpo" or one that you registered; `preset` of GRPO: "dapo", …
    - `overrides`: settings by name where that is unique (`lr=1e-6`), by section and name
      (`optimizer__lr=1e-6`), or a section at a time (a dict or `OptimizerConfig(lr=1e-6)`). The
      section `async` is `async_` in Python (`async_={"max_staleness": 1}`)

    Returns metrics, history, paths and the trained model (None where it was spread over devices:
    load paths.hf). Raises ValueError that names the field where something can't work.
    """
    reward_fn = pop_reward(overrides, reward_fn)
    return _run(
        make_config(algorithm, preset=preset, **overrides),
        model,
        tokenizer,
        train=dataset,
        validation=validation,
        reward=reward_fn,
        environment=environment_factory,
        callbacks=callbacks,
    )


def pop_reward(overrides: dict[str, Any], reward_fn: Reward | None) -> Reward | None:
    """Return `reward_fn`, or a `reward` among the overrides that is no name; remove it."""
    if not is_reward(reward := overrides.get("reward")):
        return reward_fn
    require(
        reward_fn is None,
        "reward",
        "must be given once",
        reward,
        "reward and reward_fn are the same; keep one",
    )
    return overrides.pop("reward")


def make_config(algorithm: str, *, preset: str | None = None, **overrides: Any) -> Any:
    """Return the config of an algorithm with overrides as `train` takes them."""
    cls = get_algorithm(algorithm).config
    return from_keywords(cls, algorithm, overrides, of_preset(cls, preset))


def from_keywords(
    cls: type[Any], command: str, overrides: Mapping[str, Any], tree: Mapping[str, Any] = {}
) -> Any:
    """Return the config of a command with overrides laid over `tree`."""
    mapping: dict[str, Any] = {}
    for name, value in overrides.items():
        key, now = _nested(cls, command, name, value)
        if key in mapping:
            both = mapping[key], now
            before, now = ({"name": x} if isinstance(x, str) else x or {} for x in both)
            twice = ", ".join(sorted(before.keys() & now.keys()))
            require(
                not twice,
                name,
                "must be given once",
                now,
                f"{key}.{twice} is given in two ways; keep one",
            )
            now = before | now
        mapping[key] = now
    return construct(cls, layer(cls, tree, mapping))


def _nested(cls: type[Any], algorithm: str, name: str, value: Any) -> tuple[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = to_dict(value)
    if callable(value) and name in own_sections(cls):
        raise ConfigError(
            f"{name} must be a name, but it is a function: decorate it with"
            f' @nemorl.register_{name}("mine"), and pass {name}="mine"',
            name,
        )
    own = leaves(cls)
    if name == "reward" in own and is_reward(value):
        raise ConfigError(
            f"reward must be a name here, but it is {short(value)}: pass it as reward_fn=", name
        )
    fields = {field.name: key_of(field.name) for field in dataclasses.fields(cls)}
    if name in fields or name in fields.values():
        return fields.get(name, name), value
    found = [MAIN.get(name, name.replace("___", "__").replace("__", "."))]
    if found[0] not in own:
        found = keys_named(name, own)
    if len(found) > 1:
        spelled = " or ".join(key.replace(".", "__") for key in found)
        raise ConfigError(f"the setting {name} is in several sections: write {spelled}", name)
    if not found:
        hint = advice(
            name.replace("__", "."),
            own,
            command=algorithm,
            near=[part for key in own for part in (key.rpartition(".")[2], key.replace(".", "__"))],
            write=lambda key: ARGUMENTS.get(key, key.replace(".", "__")) + "=",
        )
        hint = hint or f"; nemorl {algorithm} --help lists them"
        raise ConfigError(f"unknown setting {name} of {algorithm}{hint}", name)
    section, _, key = found[0].rpartition(".")
    return section, {key: value}


def is_reward(value: Any) -> bool:
    """Return whether a value is a reward that is not a name."""
    parts = value if isinstance(value, list | tuple) else [value]
    return any(
        callable(part) or hasattr(part, "step") or isinstance(part, Mapping) for part in parts
    )


def _run(
    config: BaseConfig, model: str | Path | nn.Module, tokenizer: Any, **given: Any
) -> TrainResult:
    if not isinstance(model, nn.Module):
        named = dataclasses.replace(config.model, path=str(model))
        return run(dataclasses.replace(config, model=named), tokenizer=tokenizer, **given)
    if tokenizer is None and not config.model.tokenizer:
        origin = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
        require(
            bool(origin),
            "tokenizer",
            "must be given with a loaded model that doesn't say where it came from",
            tokenizer,
            "pass tokenizer=",
        )
        tokenizer = load_tokenizer(origin, trust_remote_code=config.model.trust_remote_code)
    return run(config, model=model, tokenizer=tokenizer, **given)


TRL = {
    "reward_funcs": "reward_fn",
    "train_dataset": "dataset",
    "eval_dataset": "validation",
    "processing_class": "tokenizer",
}
"""Arguments of TRL's trainers, which a trainer takes, too."""


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Trainer:
    """A model with the settings of an algorithm, and what it is trained on.

    The arguments are as in `nemorl.train`, or have TRL's names. Nothing is loaded before `fit`.
    """

    algorithm: ClassVar[str]
    model: str | Path | nn.Module
    config: BaseConfig
    given: Mapping[str, Any]
    """Arguments of `fit`, and the tokenizer, that are known already."""

    def __init__(
        self,
        model: str | Path | nn.Module | None = None,
        reward_fn: Reward | None = None,
        args: Any = None,
        dataset: Rows = None,
        *,
        preset: str | None = None,
        **overrides: Any,
    ) -> None:
        require(
            model is not None, "model", "must be given", model, "name a folder, or pass a model"
        )
        given: dict[str, Any] = {"reward_fn": reward_fn, "dataset": dataset}
        for name in ("validation", "tokenizer", "callbacks", "environment_factory", *TRL):
            value, ours = overrides.pop(name, None), TRL.get(name, name)
            if value is not None:
                require(
                    given.get(ours) is None,
                    name,
                    "must be given once",
                    value,
                    f"it is given as {ours}, too; keep one",
                )
                given[ours] = value
        cls = get_algorithm(self.algorithm).config
        if args is None:
            args = make_config(self.algorithm, preset=preset, **overrides)
        else:
            require(
                isinstance(args, cls),
                "args",
                f"must be a nemorl.{cls.__name__}",
                args,
                "pass the settings by name: lr=1e-6, num_generations_per_prompt=8"
                " (docs/coming-from.md has TRL's)",
            )
            both = sorted([*overrides, *["preset"] * (preset is not None)])
            require(not both, "args", "can't be given together with settings", both, "keep one")
        vars(self).update(model=model, config=args, given=given)

    @classmethod
    def from_pretrained(cls, model: str | Path | nn.Module, **arguments: Any) -> "Trainer":
        """Return a trainer with the arguments of `nemorl.train`; nothing is loaded yet."""
        return cls(model, **arguments)

    def fit(
        self,
        dataset: Rows = None,
        *,
        reward_fn: Reward | None = None,
        validation: Rows = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainResult:
        """Train as `nemorl.train`; what is not given here is as the trainer was made."""
        now = {
            "dataset": dataset,
            "reward_fn": reward_fn,
            "validation": validation,
            "callbacks": callbacks or None,
        }
        given = dict(self.given) | {name: value for name, value in now.items() if value is not None}
        return _run(
            self.config,
            self.model,
            given.get("tokenizer"),
            train=given["dataset"],
            validation=given.get("validation"),
            reward=given["reward_fn"],
            environment=given.get("environment_factory"),
            callbacks=given.get("callbacks") or (),
        )

    def train(self) -> TrainResult:
        """Train on the data set that the trainer was made with. `run={"resume": True}` resumes."""
        return self.fit()

    def __repr__(self) -> str:
        model = type(self.model).__name__ if isinstance(self.model, nn.Module) else str(self.model)
        now = flat(without_secrets(to_dict(self.config)))
        parts = [f"{key}={now.get(key)!r}" for key in changed_settings(self.config)]
        return f"{type(self).__name__}({', '.join([repr(model), *parts])})"


class SFTTrainer(Trainer):
    """Supervised fine-tuning.

    `SFTTrainer.from_pretrained("Qwen/Qwen3-0.6B", lr=1e-5).fit("demonstrations.jsonl")`
    """

    algorithm = "sft"


class GRPOTrainer(Trainer):
    """GRPO and its relatives.

    `GRPOTrainer.from_pretrained("runs/sft", preset="dapo").fit(rows, reward_fn=my_reward)`, or
    `GRPOTrainer("runs/sft", reward_funcs=my_reward, train_dataset=rows, preset="dapo").train()`
    """

    algorithm = "grpo"


class PPOTrainer(Trainer):
    """PPO, with a critic.

    `PPOTrainer.from_pretrained("runs/sft", critic={"lr": 1e-5}).fit(rows, reward_fn=my_reward)`
    """

    algorithm = "ppo"


class DPOTrainer(Trainer):
    """Learning from preferences.

    `DPOTrainer.from_pretrained("runs/sft", loss="simpo").fit("pairs.jsonl")`
    """

    algorithm = "dpo"


class DistillTrainer(Trainer):
    """Learning from a teacher.

    `DistillTrainer.from_pretrained("small", teacher={"model": "runs/rl"}).fit("prompts.jsonl")`
    """

    algorithm = "distill"
