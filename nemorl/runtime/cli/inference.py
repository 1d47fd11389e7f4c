"""Using a model without training it: `evaluate`, `generate` and `export`."""

import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.checks import require, short, warn
from nemorl.data.datasets import load_rows, parts_of, to_prompts, warn_of_strings
from nemorl.data.rows import ENVIRONMENT, Row, for_rows
from nemorl.data.sources import known_set, set_names, sources_of
from nemorl.data.templates import with_chat_template
from nemorl.models.hub import load_tokenizer, max_positions, model_folder
from nemorl.models.source import ModelSource
from nemorl.rollout.calls import EventLoop, blocking
from nemorl.rollout.collect import Rollouts, collect, join
from nemorl.rollout.config import RolloutConfig
from nemorl.rollout.conversation import Failure, Prompts, messages_of, text_of
from nemorl.rollout.environment import check_rows
from nemorl.rollout.environments import Environment, check_limits, make_environment
from nemorl.rollout.episodes import ByRow, with_environment_tools
from nemorl.rollout.evaluation import METRICS, summaries
from nemorl.rollout.generation import GenerationBackend
from nemorl.rollout.random import derive_seed
from nemorl.runtime.cli.api import from_keywords, pop_reward
from nemorl.runtime.cli.settings import (
    REWARDED,
    SAMPLED,
    AnswerConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    LoadedConfig,
    ServeConfig,
    print_settings_of_run,
    settings_of_run,
)
from nemorl.runtime.config.tree import layer, nested, require_secrets
from nemorl.runtime.config.yaml_io import Trust
from nemorl.runtime.run.data import Reward, Rows, check_names, print_known, read_rows, reward_for
from nemorl.runtime.run.devices import check_device, computes_on_accelerator, this_machine
from nemorl.runtime.run.launch import model_config_of, workers_of
from nemorl.runtime.run.parts import proofs_of
from nemorl.runtime.run.registry import check_generation, get_generation_backend, require_score
from nemorl.runtime.run.samples import said
from nemorl.runtime.serve.agents import INSTALL, Agent, led_by
from nemorl.runtime.serve.session import Session, Unrecorded
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.export import write_checkpoint
from nemorl.runtime.watch.log import waiting_for_engines

if TYPE_CHECKING:
    from nemorl.runtime.serve.endpoint import Endpoint

KEPT = 1_000
"""Answers that a served model goes on from with their own tokens, of each key."""
Answers = TypeVar("Answers", bound=AnswerConfig)


def evaluate(
    model: str | Path,
    dataset: Rows,
    reward_fn: Reward | None = None,
    *,
    environment_factory: Any = None,
    trust_code: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Return accuracy (`Rollouts.correct`), mean rewards and length of a model's answers to data,
    the share that a limit cut, the `metrics` of environments, tables (`summaries`) and the answers.

    The arguments are as in `nemorl.train`, the overrides settings of `nemorl eval`. A run's
    directory as the model brings the run's columns, prompts, rewards and lengths;
    `trust_code=True` lets it name code (see `load_config`)::

        evaluate("runs/rl", "test.jsonl", max_new_tokens=64)["accuracy"]
    """
    reward = pop_reward(overrides, reward_fn)
    rewarded = reward is not None or "reward" in overrides or environment_factory is not None
    without = SAMPLED if "choices" in overrides else REWARDED if rewarded else ()
    known = [known_set(each) is not None for each in sources_of(dataset)]
    config = _config(EvalConfig, "eval", model, trust_code, overrides, known, without)
    return evaluate_config(config, dataset, reward, environment_factory)


def evaluate_config(
    config: EvalConfig, dataset: Rows = None, reward: Reward | None = None, environment: Any = None
) -> dict[str, Any]:
    """Return the result of `evaluate`."""
    environment = led_by(environment, config.rollout)
    require(
        config.choices is None or (reward is None and environment is None),
        "choices",
        "must be given without reward and environment",
        config.choices,
        "remove one of them",
    )
    sets = _sets(config, dataset, reward, environment)
    rows = [row for part in sets for row in part.rows]
    sampling = replace(config.generation.sampling_params(), n=config.n)
    answers, failed, metrics = list[dict[str, Any]](), list[str](), dict[str, float]()
    with _loaded(config, rows, sets[0].environment) as (prompts, generator):
        at_a_time = config.generation.num_replicas * config.generation.max_batch_size // config.n
        numbered, begin = replace(prompts, groups=range(len(prompts))), 0
        for part in sets:
            mine = numbered.take(range(begin, begin + len(part.rows)))
            begin += len(part.rows)
            slices = _with_progress(mine, max(3, at_a_time))
            if config.choices is not None:
                for some in slices:
                    answers += _chosen(generator, some, part, config.choices)
                continue
            joined = join(
                [
                    collect(generator, part.environment, some, sampling, seed=config.seed)
                    for some in slices
                ]
            )
            answers += _records(joined, part)
            failed += [x.outcome.reason for x in joined.failed if isinstance(x.outcome, Failure)]
            of_set, turns = dict(joined.metrics), float(joined.num_turns.float().mean())
            of_set |= {} if turns == 1 else {"turns": turns}
            prefix = f"{part.name}/" if len(sets) > 1 else ""
            metrics |= {prefix + name: value for name, value in of_set.items()}
    if failed:
        share = f"{len(failed)} of {len(failed) + len(answers)} conversations"
        warn(f"{share} failed and are not counted, the first with {short(failed[0], 300)}")
    if config.generation.max_new_tokens is None:
        _warn_of_cuts(answers, config.generation.longest_response)
    rewards = [answer.get("rewards", {}) for answer in answers]
    components = {
        f"reward/{name}": fmean(each[name] for each in rewards if name in each)
        for name in dict.fromkeys(chain(*rewards))
    }
    lines = summaries(answers)
    return {
        **{k: lines[0][k] for k in (*METRICS, "truncated_fraction") if k in lines[0]},
        **components,
        "metrics": metrics,
        "response_length": fmean(answer["num_tokens"] for answer in answers),
        "num_rows": len(rows),
        **({"num_failed": len(failed)} if failed else {}),
        "summaries": lines,
        "answers": answers,
    }


def _warn_of_cuts(answers: Sequence[Mapping[str, Any]], limit: int) -> None:
    all_of, setting = Counter(answer["data"] for answer in answers), "generation.max_new_tokens"
    cut = Counter(answer["data"] for answer in answers if answer.get("cut_by") == setting)
    most = [f"{cut[x]} of {all_of[x]} responses to {x}" for x in cut if cut[x] > all_of[x] / 100]
    if most:
        warn(f"{setting} {limit} cut {', '.join(most)}, maybe before their answer: raise it")


@dataclass(frozen=True)
class _Set:
    name: str
    rows: Sequence[Row]
    environment: Any
    """None: choices are scored."""
    category: str | None


def _sets(config: EvalConfig, dataset: Rows, reward: Reward | None, leads: Any) -> list[_Set]:
    source = config.data.validation if dataset is None else dataset
    print_known(source)
    rows, sets = read_rows(config.data, "validation", dataset) or [], list[_Set]()
    for number, (part, name) in enumerate(zip(sources_of(source), set_names(source), strict=True)):
        mine = [row for row in rows if row.source == number][: config.max_rows]
        environment = None
        if config.choices is None:
            judge = reward_for(config.reward, part) if reward is None else reward
            environment = make_environment(
                judge,
                config.reward_weights,
                config.reward_kwargs,
                environment=leads,
                chosen=reward is not None or config.reward != EvalConfig.reward,
                workers=workers_of(config.rollout),
            )
            check_limits(environment, config.rollout)
            check_rows(environment, mine)
        check_names(config.data, environment)
        known = known_set(part)
        usual = ENVIRONMENT if isinstance(environment, ByRow) else None
        category = config.by or (known and known.category) or usual
        sets.append(_Set(name, mine, environment, category))
    columns = sorted({column for row in rows for column in row})
    require(
        config.by in (None, *columns),
        "by",
        f"must be a column of the rows ({', '.join(columns)})",
        config.by,
        "name one",
    )
    return sets


def _heading(part: _Set, row: Mapping[str, Any], group: Any, prompt: str) -> dict[str, Any]:
    category = None if part.category is None else row.get(part.category)
    named = {} if category is None else {"category": str(category)}
    return {"data": part.name, "group": int(group), **named, "prompt": prompt}


def _records(rollouts: Rollouts, part: _Set) -> list[dict[str, Any]]:
    records = []
    for i, completion in enumerate(rollouts.completions):
        row, read = rollouts.rows[i], rollouts.answers[i]
        conversation = rollouts.conversations[i]
        records.append(
            {
                **_heading(part, row, rollouts.group_id[i], conversation.text),
                "response": completion.text,
                "answer": row.get("answer"),
                **({} if read is None else {"extracted_answer": read}),
                **rollouts.judged(i),
                **rollouts.rewards_of(i),
                "num_tokens": int(rollouts.lengths[i]),
                "finish_reason": completion.finish_reason,
                **({"cut_by": conversation.cut_by} if conversation.cut_by else {}),
                **({} if len(conversation.turns) == 1 else {"turns": said(conversation)}),
            }
        )
    return records


def _choices_of(template: str, row: Mapping[str, Any]) -> tuple[list[str], list[str], int]:
    """Return a row's choices, the same in their template, and the index of the right one."""
    parts = parts_of(template if "{" in template else f"{{{template}}}", "choices")
    column, *more = [name for _, name in parts if name]
    require(
        not more, "choices", "must name one column", template, 'write it as COLUMN or " {COLUMN}"'
    )
    texts: Any = row.get(column)
    answer, several = row.get("answer"), isinstance(texts, list) and len(texts) > 1
    require(
        several and all(isinstance(text, str) and text for text in texts),
        f"the column {column}",
        "must be a list of at least two texts",
        texts,
        "name another column by choices",
    )
    ways = [*map(str, range(len(texts))), *ascii_uppercase[: len(texts)]]
    ways = texts + ways if isinstance(answer, str) else ways
    require(
        str(answer) in ways,
        "answer (data.answer_column)",
        "must be one of the choices, its index from 0, or its letter",
        answer,
        "name its column",
    )
    framed = ["".join(part + (text if name else "") for part, name in parts) for text in texts]
    return texts, framed, ways.index(str(answer)) % len(texts)


def _tokens_of(tokenizer: Any, template: str, row: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of each choice's text alone, as of a response."""
    _, framed, _ = _choices_of(template, row)
    tokens = tokenizer(framed, add_special_tokens=False)["input_ids"]
    require(
        all(tokens),
        "choices",
        "must have a token in each text",
        framed,
        "change the text, or the tokenizer",
    )
    return tokens


def _chosen(
    generator: GenerationBackend, prompts: Prompts, part: _Set, template: str
) -> list[dict[str, Any]]:
    """Return a record for each prompt: the choice that is likeliest to follow it, by the sum of its
    tokens' log-probabilities, and by that sum per byte.
    """
    tokens = [_tokens_of(prompts.tokenizer, template, row) for row in prompts.rows]
    pairs = zip(prompts.token_ids, tokens, strict=True)
    sequences = [[*prompt, *ids] for prompt, choices in pairs for ids in choices]
    scores = iter(blocking(generator.score(sequences)).token_logprobs)
    records = []
    for i, row in enumerate(prompts.rows):
        texts, _, right = _choices_of(template, row)
        begin = len(prompts.token_ids[i])
        logprobs = [float(next(scores)[begin:].sum(dtype=float)) for _ in texts]
        by_byte = [x / len(text.encode()) for x, text in zip(logprobs, texts, strict=True)]
        best = logprobs.index(max(logprobs))
        records.append(
            {
                **_heading(part, row, prompts.groups[i], text_of(messages_of(row))),
                "response": texts[best],
                "answer": texts[right],
                "reward": float(best == right),
                "correct": best == right,
                "correct_norm": by_byte.index(max(by_byte)) == right,
                "choices": texts,
                "logprobs": logprobs,
                "num_tokens": len(tokens[i][best]),
            }
        )
    return records


def generate(
    model: str | Path,
    prompt: str | Sequence[str] = (),
    *,
    trust_code: bool = False,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Return answers to prompts, each with its log-probability in nats.

    The overrides are settings of `nemorl generate`, by name as `nemorl.train` takes them; a run's
    directory as the model brings its own as in `evaluate`::

        generate("Qwen/Qwen3-0.6B", "12+34=", temperature=0)[0]["response"]
    """
    overrides["prompt"] = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    return generate_config(_config(GenerateConfig, "generate", model, trust_code, overrides))


def generate_config(config: GenerateConfig) -> list[dict[str, Any]]:
    """Return the result of `generate`."""
    texts = config.prompts()
    columns = {name for _, name in parts_of(config.data.prompt_template or "{prompt}") if name}
    column = columns.pop() if len(columns) == 1 else "prompt"  # a run's may have another name
    rows = load_rows(
        [{column: text} for text in texts],
        prompt_template=config.data.prompt_template,
        system_prompt=config.data.system_prompt,
        chat=config.data.chat,
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


@contextmanager
def served(config: ServeConfig) -> Iterator[tuple["Endpoint", dict[str, str]]]:
    """Serve a model in the block. Gives the server, and the keys that were made for it, by name."""
    try:
        from nemorl.runtime.serve.endpoint import Endpoint, Key
    except ImportError as error:
        raise ValueError(f"nemorl serve needs a server ({error}): {INSTALL}") from error
    named, made = config.read_keys()
    tls = (config.tls_certificate, config.tls_key)
    options: Any = {"host": config.host, "port": config.port, "audit": config.audit, "tls": tls}
    options["loads"] = True
    if config.tinker:
        from nemorl.runtime.cli.service import trained

        with trained(config, options) as endpoint:
            keys = {key: Key(name=name, role=role) for name, (key, role) in named.items()}
            endpoint.keys, endpoint.loads = keys, False
            yield endpoint, made
        return
    endpoint = Endpoint(**options)
    with (
        closing(endpoint),
        _loaded(config, ()) as (prompts, generator),
        closing(EventLoop("nemorl-policy")) as loop,
        closing(endpoint),  # first, while the policy still answers
    ):
        params, longest = config.generation.sampling_params(), prompts.limits.max_tokens
        policy = Unrecorded(generator=generator, params=params, longest=longest)

        model = config.name or config.model.path

        async def session() -> Session:
            return Session(
                policy, prompts.tokenizer, model=model, longest=longest, free=True, most=KEPT
            )

        for name, (key, role) in named.items():
            own = loop.run(session()) if role == "chat" else None
            endpoint.keys[key] = Key(name=name, role=role, session=own)
        endpoint.loads = False
        yield endpoint, made


def export(run: str | Path, output: str | Path, **overrides: Any) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder, and return the folder.

    The overrides are settings of `nemorl export`::

        export("runs/rl", "my-model", step="best")
    """
    settings = {**overrides, "run": str(run), "output": str(output)}
    return export_config(from_keywords(ExportConfig, "export", settings))


def export_config(config: ExportConfig) -> Path:
    """Return the result of `export`."""
    directory = RunDirectory.open(config.run)
    directory.require_checkpoint()
    if config.step in (None, "best"):
        found = (checkpoint.best if config.step else checkpoint.latest)(directory.path)
    else:
        found = directory.checkpoints / f"step_{config.step}"
    if found is None or not found.exists():
        steps = ", ".join(path.name for path in checkpoint.present(directory.path).values())
        unranked = " and no run.metric that ranks them" if config.step == "best" else ""
        raise ValueError(
            f"step must be the step of a checkpoint in {directory.checkpoints}, but there is none"
            f" for {config.step}: there are {steps}{unranked}"
        )
    trusts = config.trust_remote_code
    output, names = Path(config.output), checkpoint.backends_of(found)
    tokenizer = load_tokenizer(str(directory.path / "tokenizer"), trust_remote_code=trusts)
    require(
        config.backend in names,
        "backend",
        f"must be one of the models in the checkpoint ({', '.join(names)})",
        config.backend,
        "omit it for the policy",
    )
    write_checkpoint(
        output,
        found / config.backend,
        tokenizer,
        lora=config.lora,
        base=config.base_model,
        trust_remote_code=trusts,
    )
    return output.resolve()


def _config(
    cls: type[Answers],
    command: str,
    model: str | Path,
    trust_code: bool,
    overrides: Mapping[str, Any],
    known: Collection[bool] = (False,),
    without: tuple[str, ...] = (),
) -> Answers:
    trust = Trust(runs="all" if trust_code else "given")
    of_run = settings_of_run(cls, str(model), trust, without=without, known=all(known))
    tree = layer(cls, {}, nested(of_run))
    config = from_keywords(cls, command, {**overrides, "model__path": str(model)}, tree)
    require_secrets(config)
    print_settings_of_run(of_run, config, known)
    return config


@contextmanager
def _loaded(
    config: LoadedConfig,
    rows: Sequence[Mapping[str, Any]],
    environment: Environment | None = None,
) -> Iterator[tuple[Prompts, GenerationBackend]]:
    model = config.model
    folder = model_folder(model.path)
    trust: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    machine, device = this_machine(), config.trainer.device
    of_model, traits = model_config_of(folder, **trust), config.generation.traits
    check_generation(config.generation, of_model, machine)
    check_device(device, ranked=False, has_gpus=machine.gpus > 0)
    address = os.environ.get("RAY_ADDRESS") if traits.engines else None
    accelerated = computes_on_accelerator(device, gpus=machine.gpus, address=address)
    tokenizer = with_chat_template(
        load_tokenizer(model.tokenizer or folder, **trust),
        model.chat_template,
        model.chat_template_kwargs,
    )
    warn_of_strings(() if isinstance(environment, Agent) else rows, tokenizer)
    if (choices := getattr(config, "choices", None)) is not None:
        require_score(config.generation)
        for_rows(rows, partial(_tokens_of, tokenizer, choices))
    token_ids = to_prompts(with_environment_tools(environment, rows, tokenizer), tokenizer)
    backend: Any = get_generation_backend(config.generation.backend)
    if traits.embedded and traits.shares_model and of_model is not None:
        proofs_of(of_model, quiet=False)  # the engine looks whether it may keep the past
    generator = backend(
        model=ModelSource(folder, device=device, **trust),
        tokenizer=tokenizer,
        precision=config.parallel.with_precision(accelerator=accelerated).precision,
    )
    try:
        with waiting_for_engines(config.generation):
            generator.setup(config.generation)
        known = (of_model and max_positions(of_model), config.generation.max_model_len)
        longest = min((each for each in known if each), default=None)
        limits = getattr(config, "rollout", RolloutConfig()).limits(longest)
        prompts = Prompts(rows, token_ids, tokenizer=tokenizer, limits=limits, shows_tools=True)
        yield prompts, generator
    finally:
        generator.shutdown()


def _with_progress(prompts: Prompts, size: int) -> Iterator[Prompts]:
    """Yield slices of nearly equal size: of a small last one a few failures would be most."""
    from rich import get_console
    from rich.progress import track

    total, count = len(prompts), -(-len(prompts) // size)
    slices = [range(i * total // count, (i + 1) * total // count) for i in range(count)]
    for each in track(slices, description="answering", transient=True):
        yield prompts.take(each)
        if count > 1 and not get_console().is_terminal:
            print(f"answered {each.stop} of {total}", file=sys.stderr, flush=True)
