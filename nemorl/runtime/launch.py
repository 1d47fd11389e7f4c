"""From a configuration to a finished run: everything is checked and loaded in order of cost, put together, and handed to the algorithm's loop."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from nemorl.checks import require
from nemorl.data.datasets import READERS, load_rows, to_examples, to_prompts
from nemorl.data.messages import limit_length
from nemorl.parallel.config import BackendConfig
from nemorl.parallel.dtensor.checkpoint import unique_tensors
from nemorl.rollout.collect import Prompts, Rollouts
from nemorl.rollout.environment import EnvironmentInterface, FunctionalRewardWrapper
from nemorl.rollout.environments import make_environment
from nemorl.runtime import checkpoint
from nemorl.runtime.algorithms import grpo, sft
from nemorl.runtime.algorithms.common import Samples, Validate, samples_of
from nemorl.runtime.algorithms.common import evaluate as evaluate_prompts
from nemorl.runtime.backends import get_generation_backend, get_training_backend
from nemorl.runtime.callbacks import Callback, closing
from nemorl.runtime.commands import EvalConfig, ExportConfig, GenerateConfig
from nemorl.runtime.config import DataConfig, GRPOConfig, SFTConfig
from nemorl.runtime.config_io import dump_yaml, load_config, to_dict
from nemorl.runtime.display import make_display
from nemorl.runtime.logging import CheckpointCallback, JsonlLogger, PlotCallback, SampleLogger, SignalWatch, tensorboard_logger
from nemorl.runtime.pretrained import ExportCallback, load_model, load_tokenizer, model_folder, require_replaceable, with_template, write_pretrained
from nemorl.runtime.run_directory import RunDirectory
from nemorl.runtime.state import LoopState, Run

Rows = Any
"""What `load_rows` takes: a path, a hub name, a list of dicts, a datasets.Dataset or a DataModule."""
Reward = str | Callable[..., float] | EnvironmentInterface


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind in memory; the rest is in its directory."""

    metrics: dict[str, float]
    """Of the last step, and of the last validation as val_…"""
    history: list[dict[str, Any]] = field(repr=False)
    """The lines of metrics.jsonl: a dict per step and per validation, told apart by `phase`."""
    directory: Path
    model: nn.Module = field(repr=False)
    """The trained model, live, with its own attention and mode."""
    tokenizer: Any = field(repr=False)


def run(
    config: SFTConfig | GRPOConfig,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    train: Rows = None,
    validation: Rows = None,
    reward: Reward | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run SFT or GRPO, as the type of `config` says, in the folder `config.run.dir`.

    A loaded `model` and `tokenizer`, rows and a reward function may be given here instead of by name in the configuration. With `config.run.resume`
    the run in the folder goes on from its last checkpoint, and ends with the numbers that it would have had without the interruption.

    Raises ValueError that names the field where something in the configuration or the data can't work, where possible before the model is loaded.
    """
    trainer_class, generator_class = get_training_backend(config.trainer.backend), get_generation_backend(config.generation.backend)
    environment = make_environment(reward or config.reward)
    train_rows = _rows(config.data, "train", train)
    validation_rows = _rows(config.data, "validation", validation)
    if isinstance(environment, FunctionalRewardWrapper) and isinstance(config, GRPOConfig):
        environment.check([*(train_rows or []), *(validation_rows or [])])
    directory = RunDirectory.create(config.run.dir, dump_yaml(config), resume=config.run.resume)
    checkpoint.sweep(directory.path)
    folder = model_folder(config.model.path)
    tokenizer = with_template(tokenizer or load_tokenizer(config.model.tokenizer or folder), config.model.chat_template)
    tokenizer.save_pretrained(directory.path / "tokenizer")
    prepared = _prepare(config, train_rows or [], validation_rows, tokenizer)

    trainer = trainer_class() if model is None else trainer_class(model)  # type: ignore[call-arg]
    steps, updates, keep_reference = prepared.num_steps, 1, False
    if isinstance(config, GRPOConfig):
        updates = grpo.updates_per_batch(config, config.num_prompts_per_step * config.num_generations_per_prompt)
        keep_reference = config.needs_reference
    trainer.setup(
        BackendConfig(
            model=replace(config.model, path=folder),
            trainer=config.trainer,
            optimizer=config.optimizer,
            seed=config.run.seed,
            total_steps=steps * updates,
            keep_reference=keep_reference,
        )
    )
    live_model, generator = trainer.model, None  # type: ignore[attr-defined]
    try:
        if isinstance(config, GRPOConfig) or len(prepared.validation_prompts):
            generator = generator_class(model=live_model, tokenizer=tokenizer, precision=config.trainer.precision)  # type: ignore[call-arg]
            generator.setup(config.generation)
        current = resumed(Run(config, trainer, generator, tokenizer, LoopState(config.run.seed), directory.path), directory, last_step=steps)
        if generator is not None:
            generator.update_weights(trainer.export_weights(), version=current.state.policy_version)
        everyone = all_callbacks(config, directory, live_model, callbacks, last_step=steps)
        with closing(everyone):
            if isinstance(config, GRPOConfig):
                grpo.run(current, environment, prepared.prompts, validate=prepared.validator(environment), callbacks=everyone)
            else:
                sft.run(current, prepared.examples, validate=prepared.validator(environment), callbacks=everyone)
    finally:
        trainer.shutdown()
        if generator is not None:
            generator.shutdown()
    history = directory.read_metrics()
    return RunResult(final_metrics(history), history, directory.path, live_model, tokenizer)


def resumed(run: Run, directory: RunDirectory, *, last_step: int) -> Run:
    """The run where its last checkpoint left it, if it is to be resumed; with a directory that shows this state and these settings."""
    config = run.config
    found = checkpoint.latest(directory.path) if config.run.resume else None
    if found is not None:
        run = replace(run, state=checkpoint.load(found, run))
        for change in changes(directory.config, config):
            warnings.warn(f"the run goes on with other settings than before: {change}", stacklevel=3)
        if run.state.step >= last_step:
            done = f"the run has {run.state.step} steps already, so there is nothing to do up to step {last_step}"
            warnings.warn(f"{done}: raise max_num_steps", stacklevel=3)
    elif config.run.resume:
        warnings.warn(f"there is no checkpoint in {directory.path} to resume from, so the run starts anew", stacklevel=3)
    directory.write_config(dump_yaml(replace(config, run=replace(config.run, resume=False))))
    directory.truncate(run.state.step if found is not None else -1)
    return run


def all_callbacks(
    config: SFTConfig | GRPOConfig, directory: RunDirectory, model: nn.Module, given: Sequence[Callback], *, last_step: int
) -> list[Callback]:
    """Those that show and record, then the caller's, then those that save: a checkpoint vouches for what was written before it."""
    observers = [
        make_display(config.run.display, total_steps=last_step),
        JsonlLogger(directory),
        SampleLogger(directory, limit=config.run.samples_per_step),
        *tensorboard_logger(directory, config.run.tensorboard),
        SignalWatch(),
        *given,
    ]
    savers: list[Callback] = [
        CheckpointCallback(directory, period=config.run.save_period, keep=config.run.keep_checkpoints, observers=tuple(observers))
    ]
    savers += [ExportCallback(directory, model)] if config.run.export else []
    savers += [PlotCallback(directory)] if config.run.plots else []
    return [*observers, *savers]


@dataclass(frozen=True)
class Prepared:
    """The data of a run as the loops take them."""

    config: SFTConfig | GRPOConfig
    examples: Sequence[Any]
    prompts: Prompts
    validation_examples: Sequence[Any]
    validation_prompts: Prompts

    @property
    def num_steps(self) -> int:
        return self.config.max_num_steps if isinstance(self.config, GRPOConfig) else sft.num_steps(self.config, len(self.examples))

    def validator(self, environment: EnvironmentInterface) -> Validate | None:
        """Validation on what the rows allow: the loss on demonstrations, and greedy answers where there is something to judge them by."""
        if not self.validation_examples and not len(self.validation_prompts):
            return None

        def validate(run: Run) -> tuple[dict[str, float], Samples]:
            metrics: dict[str, float] = {}
            answers: Samples = []
            if self.validation_examples:
                metrics["loss"] = sft.validation_loss(run, self.validation_examples, batch_size=256)
            if len(self.validation_prompts):
                assert run.generator is not None
                sampling = self.config.generation.sampling_params(greedy=True)
                found, rollouts = evaluate_prompts(run.generator, environment, self.validation_prompts, sampling, seed=self.config.run.seed)
                metrics, answers = metrics | found, samples_of(rollouts, None, self.config.run.samples_per_step)
            return metrics, answers

        return validate


def _prepare(config: SFTConfig | GRPOConfig, train: list[dict], validation: list[dict] | None, tokenizer: Any) -> Prepared:
    if not train:
        raise ValueError("data.train must name rows to train on, but it is empty: give --data.train FILE, or run(config, train=rows)")
    held_out = (validation or [])[: config.run.max_val_samples]
    if isinstance(config, GRPOConfig):
        return Prepared(config, [], _prompts(config, train, tokenizer), [], _prompts(config, held_out, tokenizer))
    examples = _examples(config, train, tokenizer)
    demonstrations = [row for row in held_out if row.get("messages") is not None or isinstance(row.get("response"), str)]
    questions = [row for row in held_out if row.get("answer") is not None]
    return Prepared(config, examples, Prompts([], []), _examples(config, demonstrations, tokenizer), _prompts(config, questions, tokenizer))


def _rows(data: DataConfig, which: str, given: Rows) -> list[dict] | None:
    source = given if given is not None else getattr(data, which)
    if source is None:
        return None
    split = data.split
    if which == "validation":
        in_hub = isinstance(source, str | Path) and Path(source).suffix not in READERS
        split = data.validation_split or ("validation" if in_hub else "train")
    columns = {name: getattr(data, name) for name in ("prompt_column", "response_column", "answer_column", "messages_column")}
    return load_rows(source, split=split, **columns)


def _prompts(config: SFTConfig | GRPOConfig, rows: list[dict], tokenizer: Any) -> Prompts:
    if not rows:
        return Prompts([], [])
    longest, answer = config.data.max_total_sequence_length, config.generation.max_new_tokens
    remedy = f"data.max_total_sequence_length is {longest}; leave room for the prompt, also of questions that SFT validates on"
    require(answer < longest, "generation.max_new_tokens", "must be below data.max_total_sequence_length", answer, remedy)
    token_ids, report = limit_length(to_prompts(rows, tokenizer), max_length=longest - answer, policy=config.data.too_long)
    if report.num_truncated or report.num_dropped:
        warnings.warn(f"prompts: {report}", stacklevel=2)
    return Prompts([rows[i] for i in report.kept], token_ids)


def _examples(config: SFTConfig, rows: list[dict], tokenizer: Any) -> Sequence[Any]:
    tokenised = to_examples(rows, tokenizer)
    examples, report = limit_length(tokenised, max_length=config.data.max_total_sequence_length, policy=config.data.too_long)
    if report.num_truncated or report.num_dropped:
        warnings.warn(f"examples: {report}", stacklevel=2)
    return examples


def changes(path: str | Path, config: Any) -> list[str]:
    """In which settings a config differs from the one in a file, but for `run` and how long it goes on."""
    before, now = _flat(to_dict(load_config(type(config), path))), _flat(to_dict(config))
    keys = [key for key in now | before if not key.startswith("run.") and key not in ("max_num_steps", "num_epochs")]
    return [f"{key} is {now.get(key)!r}, was {before.get(key)!r}" for key in keys if now.get(key) != before.get(key)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    parts = [_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value} for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


def final_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last step's metrics, and the last validation's with `val_` before their names.

    >>> final_metrics([{"step": 1, "phase": "train", "loss": 2.0}, {"step": 1, "phase": "validation", "accuracy": 0.5}])
    {'loss': 2.0, 'val_accuracy': 0.5}
    """
    last: dict[str, float] = {}
    for line in history:
        prefix = "" if line["phase"] == "train" else "val_"
        last |= {prefix + name: value for name, value in line.items() if name not in ("step", "time", "phase")}
    return last


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Answer the prompts of a data set: accuracy (share of answers with a reward of at least 1), mean reward and length, and every answer."""
    environment = make_environment(config.reward)
    named = Path(config.data).suffix not in READERS
    data = DataConfig(
        validation=config.data,
        validation_split=config.split or ("test" if named else None),
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
    )
    rows = (_rows(data, "validation", None) or [])[: config.max_rows]
    prompts, generator = _loaded(config, rows)
    sampling = replace(config.generation.sampling_params(), n=config.n)
    parts: list[Rollouts] = []
    for part, first in _with_progress(prompts, max(1, config.generation.max_batch_size // config.n)):
        parts.append(evaluate_prompts(generator, environment, part, sampling, seed=config.seed, first_group=first)[1])
    answers: list[dict[str, Any]] = [
        {"prompt": text, "response": completion.text, "answer": row.get("answer"), "reward": float(reward), "num_tokens": len(completion.token_ids)}
        for rollouts in parts
        for text, completion, row, reward in zip(rollouts.texts, rollouts.completions, rollouts.rows, rollouts.rewards, strict=True)
    ]
    count = len(answers)
    return {
        "accuracy": sum(answer["reward"] >= 1 for answer in answers) / count,
        "reward": sum(answer["reward"] for answer in answers) / count,
        "response_length": sum(answer["num_tokens"] for answer in answers) / count,
        "num_rows": len(rows),
        "answers": answers,
    }


def generate(config: GenerateConfig) -> list[dict[str, Any]]:
    """Answers to prompts, with the log-probability of each as it was sampled, in nats."""
    from nemorl.rollout.random import derive_seed

    texts = config.prompts()
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": text}] if config.chat else text} for text in texts]
    prompts, generator = _loaded(config, rows)
    sampling = replace(config.generation.sampling_params(), n=config.n)
    requests = [sampling if config.seed is None else replace(sampling, seed=derive_seed(config.seed, i)) for i in range(len(rows))]
    completions = generator.generate(prompts.token_ids, requests)
    return [
        {
            "prompt": texts[i // config.n],
            "response": c.text,
            "logprob": sum(c.logprobs),
            "finish_reason": c.finish_reason,
            "num_tokens": len(c.token_ids),
        }
        for i, c in enumerate(completions)
    ]


def export(config: ExportConfig) -> Path:
    """A checkpoint of a run as a Hugging Face folder."""
    directory = RunDirectory.open(config.run)
    found = checkpoint.latest(directory.path) if config.step is None else directory.checkpoints / f"step_{config.step}"
    if found is None or not found.exists():
        there = sorted(path.name for path in directory.checkpoints.glob("step_*"))
        raise ValueError(
            f"step must be that of a checkpoint in {directory.checkpoints}, but there is none for {config.step}: "
            f"there are {', '.join(there) or 'none at all'}"
        )
    checkpoint.verify(found)
    require_replaceable(Path(config.output).resolve())
    model = load_model(str(found / "trainer"))
    return write_pretrained(Path(config.output), unique_tensors(model).items(), model, load_tokenizer(str(directory.path / "tokenizer")))


def _loaded(config: EvalConfig | GenerateConfig, rows: list[dict]) -> tuple[Prompts, Any]:
    folder = model_folder(config.model)
    tokenizer = with_template(load_tokenizer(config.tokenizer or folder), config.chat_template)
    token_ids = to_prompts(rows, tokenizer)
    generator = get_generation_backend(config.generation.backend)(model=load_model(folder, device=config.device), tokenizer=tokenizer)  # type: ignore[call-arg]
    generator.setup(config.generation)
    return Prompts(rows, token_ids), generator


def _with_progress(prompts: Prompts, size: int) -> Any:
    """Slices of the prompts with the number of each one's first, under a progress bar."""
    from rich.progress import track

    starts = range(0, len(prompts), size)
    for first in track(starts, description="answering", transient=True):
        yield prompts.take(range(first, min(first + size, len(prompts)))), first
