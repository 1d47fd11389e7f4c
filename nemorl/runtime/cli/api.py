"""Training in a few lines of Python: `nemorl.train`, and a trainer class for each algorithm."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from nemorl.checks import closest, require
from nemorl.models.pretrained import load_tokenizer
from nemorl.runtime.config.base import BaseConfig
from nemorl.runtime.config.flags import MAIN
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.presets import preset_overrides
from nemorl.runtime.config.tree import construct, dotted_keys, layer, to_dict
from nemorl.runtime.config.yaml_io import ConfigError
from nemorl.runtime.run.callbacks import Callback
from nemorl.runtime.run.data import Reward, Rows
from nemorl.runtime.run.result import TrainResult
from nemorl.runtime.start.open_run import run
from nemorl.runtime.start.registry import get_algorithm


def train(
    model: str | Path | nn.Module,
    dataset: Rows,
    reward_fn: Reward | None = None,
    *,
    algorithm: str = "grpo",
    tokenizer: Any = None,
    validation: Rows = None,
    callbacks: Sequence[Callback] = (),
    preset: str | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train a model on a data set by an algorithm.

    - `model`: a folder, a hub name, or a loaded Hugging Face model (then `tokenizer` too, unless
      the model knows where it came from)
    - `dataset`, `validation`: a file, a hub name, a list of dicts, a datasets.Dataset, a
      DataModule, or several of them
    - `reward_fn`: fn(prompt, response) -> float, fn(prompts, responses) -> list of floats (either
      may name columns of the data), the name of a reward, an environment, or several in a list or
      mapping
    - `algorithm`: "grpo", "sft", "dpo" or one that you registered; `preset` of GRPO: "dapo", …
    - `overrides`: settings by name where that is unique (`lr=1e-6`), by section and name
      (`optimizer__lr=1e-6`), or a section at a time (a dict or `OptimizerConfig(lr=1e-6)`)

    Returns metrics, history, paths and the trained model (None where it was spread over devices:
    load paths.hf). Raises ValueError that names the field where something can't work.
    """
    config = make_config(algorithm, preset=preset, **overrides)
    return _run(
        config,
        model,
        tokenizer,
        train=dataset,
        validation=validation,
        reward=reward_fn,
        callbacks=callbacks,
    )


def make_config(algorithm: str, *, preset: str | None = None, **overrides: Any) -> Any:
    """Return the config of an algorithm with overrides as `train` takes them.

    >>> config = make_config("grpo", preset="dapo", lr=1e-6, generation={"max_new_tokens": 64})
    >>> config.optimizer.lr, config.generation.max_new_tokens, config.loss.clip_high
    (1e-06, 64, 0.28)
    """
    cls = get_algorithm(algorithm).config
    require(
        preset is None or algorithm == "grpo",
        "preset",
        "is for grpo",
        preset,
        'remove it, or use algorithm="grpo"',
    )
    tree = layer(cls, {}, preset_overrides(preset) if preset is not None else {})
    mapping: dict[str, Any] = {}
    for name, value in overrides.items():
        key, now = _nested(cls, algorithm, name, value)
        if key in mapping:  # loss="gspo", clip_low=0.1
            before, now = (
                {"name": part} if isinstance(part, str) else part or {}
                for part in (mapping[key], now)
            )
            twice = ", ".join(sorted(before.keys() & now.keys()))
            remedy = f"{key}.{twice} is given in two ways; keep one"
            require(not twice, name, "must be given once", now, remedy)
            now = before | now
        mapping[key] = now
    return construct(cls, layer(cls, tree, mapping))


def _nested(cls: type[BaseConfig], algorithm: str, name: str, value: Any) -> tuple[str, Any]:
    """Return the top-level key of an override, and its value there."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = to_dict(value)
    if name in ("loss", "advantage") and callable(value) and cls is GRPOConfig:
        raise ConfigError(
            f"{name} must be a name, but it is a function: decorate it with"
            f' @nemorl.register_{name}("mine"), and pass {name}="mine" (settings: {name}={{"name":'
            ' "mine", "setting": 0.1})',
            name,
        )
    keys = dotted_keys(cls)
    own = [key for key, ours in keys.items() if ours]
    if name in {key.partition(".")[0] for key in own}:  # a whole section, or a setting in none
        return name, value
    found = [MAIN.get(name, name.replace("__", "."))]
    if found[0] not in own:
        found = [key for key in own if key.rpartition(".")[2] == name]
    if not found and name in keys:  # another library's, which is refused with ours
        return name, value
    if len(found) > 1:
        spelled = " or ".join(key.replace(".", "__") for key in found)
        raise ConfigError(f"the setting {name} is in several sections: write {spelled}", name)
    if not found:
        known = [part for key in keys for part in (key.rpartition(".")[2], key.replace(".", "__"))]
        hint = closest(name, known) or f"; nemorl {algorithm} --help lists them"
        raise ConfigError(f"unknown setting {name} of {algorithm}{hint}", name)
    section, _, key = found[0].rpartition(".")
    return section, {key: value}


def _run(config: Any, model: str | Path | nn.Module, tokenizer: Any, **given: Any) -> TrainResult:
    if not isinstance(model, nn.Module):
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, path=str(model))
        )
        return run(config, tokenizer=tokenizer, **given)
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


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model with the settings of an algorithm."""

    algorithm: ClassVar[str]
    model: str | Path | nn.Module
    config: Any
    tokenizer: Any = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        preset: str | None = None,
        **overrides: Any,
    ) -> "Trainer":
        """Return a trainer with the arguments of `nemorl.train`; nothing is loaded yet."""
        return cls(model, make_config(cls.algorithm, preset=preset, **overrides), tokenizer)

    def fit(
        self,
        dataset: Rows,
        *,
        reward_fn: Reward | None = None,
        validation: Rows = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainResult:
        """Train, with arguments and result as of `nemorl.train`."""
        return _run(
            self.config,
            self.model,
            self.tokenizer,
            train=dataset,
            validation=validation,
            reward=reward_fn,
            callbacks=callbacks,
        )


class SFTTrainer(Trainer):
    """Supervised fine-tuning.

    `SFTTrainer.from_pretrained("Qwen/Qwen3-0.6B", lr=1e-5).fit("demonstrations.jsonl")`
    """

    algorithm = "sft"


class GRPOTrainer(Trainer):
    """GRPO and its relatives.

    `GRPOTrainer.from_pretrained("runs/sft", preset="dapo").fit(rows, reward_fn=my_reward)`
    """

    algorithm = "grpo"


class DPOTrainer(Trainer):
    """Learning from preferences.

    `DPOTrainer.from_pretrained("runs/sft", loss="simpo").fit("pairs.jsonl")`
    """

    algorithm = "dpo"
