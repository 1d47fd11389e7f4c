"""Using a model without training it: `evaluate`, `generate` and `export`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nemorl.checks import require
from nemorl.data.datasets import load_rows, to_prompts
from nemorl.data.prompts import parts_of, warn_of_strings
from nemorl.data.templates import with_chat_template
from nemorl.models.causal_lm import load_causal_lm, usable_device
from nemorl.models.pretrained import load_tokenizer, model_folder
from nemorl.rollout.collect import Prompts, collect, join
from nemorl.rollout.environment import check_rows
from nemorl.rollout.environments import make_environment
from nemorl.rollout.generation import GenerationBackend
from nemorl.rollout.random import derive_seed
from nemorl.runtime.cli.api import from_keywords, is_reward
from nemorl.runtime.cli.settings import (
    AnswerConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    print_settings_of_run,
    settings_of_run,
)
from nemorl.runtime.config.tree import layer, leaves, nested
from nemorl.runtime.config.trust import Trust
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.data import read_rows
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.export import write_checkpoint
from nemorl.runtime.start.registry import get_generation_backend
from nemorl.runtime.watch.waiting import waiting_for_engines

T = TypeVar("T")


def evaluate(config: EvalConfig | None = None, **settings: Any) -> dict[str, Any]:
    """Return accuracy, mean rewards and length of a model's answers to data, and the answers.

    The settings are those of `nemorl eval`, by name as `nemorl.train` takes them, or an EvalConfig,
    which is taken as it is. `reward` may be functions, too. Of a run as the `model`, the settings
    are the defaults; `trust_code=True` lets it name code (see `load_config`).

    >>> evaluate(model="runs/rl/hf", data="test.jsonl", max_new_tokens=64)       # doctest: +SKIP
    {'accuracy': 0.93, 'reward': 0.93, ...}
    """
    reward: Any = settings.get("reward")
    if own := is_reward(reward):
        settings["reward"] = "exact_match"
    config = _settings(EvalConfig, "eval", config, settings)
    reward = reward if own else config.reward
    environment = make_environment(reward, config.reward_weights, config.reward_kwargs)
    rows = (read_rows(config.rows(), "validation") or [])[: config.max_rows]
    check_rows(environment, rows)
    sampling = replace(config.generation.sampling_params(), n=config.n)
    with _loaded(config, rows) as (prompts, generator):
        at_a_time = config.generation.num_replicas * config.generation.max_batch_size // config.n
        rollouts = join(
            [
                collect(generator, environment, part, sampling, seed=config.seed, first_group=first)
                for part, first in _with_progress(prompts, max(1, at_a_time))
            ]
        )
    answers: list[dict[str, Any]] = [
        {
            "prompt": rollouts.texts[i],
            "response": completion.text,
            "answer": rollouts.rows[i].get("answer"),
            "reward": float(rollouts.rewards[i]),
            **rollouts.rewards_of(i),
            "num_tokens": len(completion.token_ids),
        }
        for i, completion in enumerate(rollouts.completions)
    ]
    return {
        **rollouts.reward_metrics(),
        "response_length": float(rollouts.lengths.float().mean()),
        "num_rows": len(rows),
        "answers": answers,
    }


def generate(config: GenerateConfig | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Return answers to prompts, each with its log-probability in nats.

    The settings are those of `nemorl generate`, by name as `nemorl.train` takes them, or a
    GenerateConfig; `prompt` may be one text. With a run as the `model` as of `evaluate`.

    >>> generate(model="Qwen/Qwen3-0.6B", prompt="12+34=", temperature=0)        # doctest: +SKIP
    [{'prompt': '12+34=', 'response': '46', 'logprob': -0.1, ...}]
    """
    if isinstance(prompt := settings.get("prompt"), str):
        settings["prompt"] = (prompt,)
    config = _settings(GenerateConfig, "generate", config, settings)
    texts = config.prompts()
    columns = {name for _, name in parts_of(config.prompt_template or "{prompt}") if name}
    column = columns.pop() if len(columns) == 1 else "prompt"  # a run's may have another name
    rows = load_rows(
        [{column: text} for text in texts],
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
        chat=config.chat,
    )
    sampling = replace(config.generation.sampling_params(), n=config.n)
    requests = [
        sampling if config.seed is None else replace(sampling, seed=derive_seed(config.seed, i))
        for i in range(len(rows))
    ]
    with _loaded(config, rows) as (prompts, generator):
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


def export(config: ExportConfig | None = None, **settings: Any) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder, and return the folder.

    The settings are those of `nemorl export`, by name, or an ExportConfig.

    >>> export(run="runs/rl", output="my-model", step="best")                    # doctest: +SKIP
    PosixPath('/…/my-model')
    """
    config = _settings(ExportConfig, "export", config, settings)
    directory = RunDirectory.open(config.run)
    directory.require_checkpoint()
    match config.step:
        case None:
            found = checkpoint.latest(directory.path)
        case "best":
            found = checkpoint.best(directory.path)
        case step:
            found = directory.checkpoints / f"step_{step}"
    if found is None or not found.exists():
        steps = ", ".join(sorted(path.name for path in directory.checkpoints.glob("step_*")))
        unranked = " and no run.metric that ranks them" if config.step == "best" else ""
        raise ValueError(
            f"step must be that of a checkpoint in {directory.checkpoints}, but there is none for"
            f" {config.step}: there are {steps}{unranked}"
        )
    trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    output = Path(config.output)
    tokenizer = load_tokenizer(str(directory.path / "tokenizer"), **trust)
    write_checkpoint(output, found, tokenizer, lora=config.lora, base=config.base_model, **trust)
    return output.resolve()


def _settings(cls: type[T], command: str, config: T | None, settings: dict[str, Any]) -> T:
    """Return the config that a function was given, or that of its keywords."""
    if config is None and issubclass(cls, AnswerConfig):
        model, trusted = settings.get("model"), bool(settings.pop("trust_code", False))
        of_run = settings_of_run(
            cls,
            str(model) if isinstance(model, str | Path) else "",
            Trust(everything=trusted, in_python=True),
            rewarded="reward" in settings,
        )
        config = from_keywords(cls, command, settings, layer(cls, {}, nested(of_run)))
        print_settings_of_run(of_run, config)
        return config
    if config is None:
        return from_keywords(cls, command, settings)
    remedy = "keep one"
    if not isinstance(config, cls):
        remedy = f'name the settings: {next(iter(leaves(cls)))}="runs/rl"'
    require(
        isinstance(config, cls) and not settings,
        "config",
        f"must be a nemorl.{cls.__name__}, without settings beside it",
        config,
        remedy,
    )
    return config


@contextmanager
def _loaded(
    config: EvalConfig | GenerateConfig, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Prompts, GenerationBackend]]:
    folder = model_folder(config.model)
    trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    tokenizer = with_chat_template(
        load_tokenizer(config.tokenizer or folder, **trust),
        config.chat_template,
        config.chat_template_kwargs,
    )
    warn_of_strings(rows, tokenizer)
    token_ids = to_prompts(rows, tokenizer)
    # An engine with a copy of its own needs the GPU for that.
    device = "cpu" if config.generation.backend == "vllm" else config.device
    backend: Any = get_generation_backend(config.generation.backend)
    generator = backend(
        model=load_causal_lm(folder, **trust).to(usable_device(device)),
        tokenizer=tokenizer,
        precision=config.param_dtype,
    )
    try:
        with waiting_for_engines(config.generation):
            generator.setup(config.generation)
        yield Prompts(rows, token_ids), generator
    finally:
        generator.shutdown()


def _with_progress(prompts: Prompts, size: int) -> Any:
    """Yield slices of the prompts and the index of each one's first."""
    from rich.progress import track

    starts = range(0, len(prompts), size)
    for first in track(starts, description="answering", transient=True):
        yield prompts.take(range(first, min(first + size, len(prompts)))), first
