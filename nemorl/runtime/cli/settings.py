"""The settings of the commands besides the algorithms."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from secrets import token_urlsafe
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Annotated, Any, ClassVar, Literal

import tyro

from nemorl.checks import all_but, at_least, refuse_unused, require, valid_seed
from nemorl.parallel.config import ModelConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.planner.config import PlanConfig
from nemorl.rollout.config import GenerationConfig, RolloutConfig
from nemorl.runtime.config.base import BaseConfig, DataConfig, RewardConfig
from nemorl.runtime.config.tree import (
    defaults,
    flat,
    key_of,
    located,
    nested,
    to_dict,
    unused,
    values,
)
from nemorl.runtime.config.yaml_io import Trust, read, without_secrets
from nemorl.runtime.run.registry import ALGORITHMS
from nemorl.runtime.store.directory import RunDirectory

OF_RUN = (
    *("data.prompt_column", "data.answer_column", "data.prompt_template", "data.system_prompt"),
    *("data.chat", "data.environment_column", "reward", "reward_weights", "reward_kwargs"),
    *("generation.max_new_tokens", "generation.ignore_eos"),
    *("generation.stop_strings", "generation.stop_token_ids", "rollout.environment"),
    *("rollout.agent", "rollout.max_turns", "rollout.timeout_s", "rollout.discount"),
)
"""Settings that `eval` and `generate` take from the run that --model names."""
OF_SET = {*OF_RUN[:3], "reward", "reward_weights", "reward_kwargs"}
"""Those of them that a known data set has itself."""
SAMPLED = (
    *("n", "reward", "reward_weights", "reward_kwargs", "rollout."),
    *("generation.temperature", "generation.top_", "generation.min_p", "generation.max_new_tokens"),
    *("generation.stop_", "generation.ignore_eos"),
)
"""How settings begin that `eval` has no use for where it scores choices."""
REWARDED = ("reward", "rollout.")
"""How those begin that another reward takes the place of."""
PROMPTS = ("prompt_column", "prompt_template", "system_prompt", "chat")


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """What the commands that sample from a model have in common."""

    unused: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": ("from_scratch",),
        "trainer": all_but(TrainerConfig, "device"),
        "parallel": all_but(ParallelPlan, "param_dtype"),
        "generation": ("colocated", "sleep_level", "weight_transport", "trainer_gpus"),
    }
    """Settings that are refused and not shown, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def __post_init__(self) -> None:
        for section, names in self.unused.items():
            given = getattr(self, section)
            refuse_unused(section, given, "is not used by this command", "remove it", names=names)
        require(
            not self.generation.traits.on_trainer,
            "generation.backend",
            "must be torch, vllm or one of yours that needs no ranks of a trainer to sample",
            self.generation.backend,
            "remove it",
        )
        require(
            self.trainer.device is None
            or not self.generation.traits.engines
            or getattr(self, "tinker", False),
            "trainer.device",
            f"is not for {self.generation.backend}, which takes the first GPU",
            self.trainer.device,
            "remove it, and set CUDA_VISIBLE_DEVICES",
        )


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(LoadedConfig):
    """What `eval` and `generate` have in common."""

    unused: ClassVar[dict[str, tuple[str, ...]]] = LoadedConfig.unused | {
        "data": all_but(DataConfig, *PROMPTS)
    }

    n: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 1
    """Answers per prompt; more than one needs a temperature above 0."""
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, n=self.n)
        require(
            self.n == 1 or self.generation.temperature > 0,
            "n",
            "must be 1 with temperature 0",
            self.n,
            "greedy answers are all the same; add --temperature 1.0",
        )


def settings_of_run(
    cls: type, model: str, trust: Trust, *, without: tuple[str, ...], known: bool
) -> dict[str, Any]:
    """Return the settings of the run that is the model of `eval` or `generate`, but for defaults,
    those that begin as in `without`, and what `known` data sets have.
    """
    directory = RunDirectory(Path(model))
    if not (model and directory.config.exists() and directory.holds_results()):
        return {}
    config, lines = read(directory.config)
    usual, given = values(cls, {}), values(cls, config)
    found = {
        key: given[key]
        for key in OF_RUN
        if not key.startswith(without) and not (known and key in OF_SET)
        if key in given and given[key] not in (None, usual[key])
    }
    with located(directory.config, lines):
        trust.require(nested(found))
    return found


def print_settings_of_run(
    of_run: Mapping[str, Any], config: LoadedConfig, known: Collection[bool]
) -> None:
    """Print to standard error which settings of a run a config has kept.

    Raises: ValueError where they are for `known` data sets and others together.
    """
    final = values(type(config), to_dict(config))
    kept = {key: value for key, value in of_run.items() if final[key] == value}
    both = [key for key in kept if key in OF_SET and not key.endswith("_column")]
    require(
        not both or not any(known) or all(known),
        "data.validation",
        f"must be known data sets, or others, but not both, with the run's {' and '.join(both)}",
        "both",
        "evaluate the known ones alone, or set these for all",
    )
    if shown := [f"{key} {without_secrets(value, key)!r}" for key, value in kept.items()]:
        print(f"settings of the run {config.model.path}: {', '.join(shown)}", file=sys.stderr)


def used_by_plan(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `plan` uses of a file for training."""
    own, hidden, usual = defaults(PlanConfig), unused(PlanConfig), flat(defaults(BaseConfig))
    free = {key: usual.get(key) for key, value in flat(own).items() if value is None}
    of_runs = {
        key_of(each.name) for algorithm in ALGORITHMS.values() for each in fields(algorithm.config)
    }
    found = {name: value for name, value in file.items() if name in own or name not in of_runs}
    for name, section in found.items():
        if isinstance(section, Mapping):
            found[name] = {
                key: value
                for key, value in section.items()
                if (full := f"{name}.{key}") not in hidden and free.get(full, ...) != value
            }
    return found


@dataclass(frozen=True, kw_only=True)
class EvalConfig(RewardConfig, AnswerConfig):
    """Answer the rows of data.validation and judge the answers by a reward."""

    unused: ClassVar[dict[str, tuple[str, ...]]] = AnswerConfig.unused | {
        "data": all_but(
            DataConfig,
            *PROMPTS,
            *("validation", "validation_split", "validation_environments"),
            *("answer_column", "environment_column"),
        )
    }

    output: str | None = None
    """Write every answer to this .jsonl file."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    choices: str | None = None
    """Column with a list of texts, of which data.answer_column has the right one or its index: the
    model chooses the likeliest, without sampling. " {COLUMN}" puts a space before each.
    """
    max_rows: int | None = None
    """Number of rows of each data set that are answered, from the top. Default: all."""
    by: str | None = None
    """Column of categories, which get lines of their own. Default: a known set's, else none."""
    json: bool = False
    """Print one JSON object with all but the answers instead of tables."""
    seed: int = 0
    """Seed of the sampling."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(temperature=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, max_rows=self.max_rows)
        valid_seed(seed=self.seed)
        if self.choices is not None:
            usual = values(type(self), {})
            for key, value in values(type(self), to_dict(self)).items():
                require(
                    not key.startswith(SAMPLED) or value == usual[key],
                    key,
                    "is not used with choices, which are scored",
                    value,
                    "remove one of them",
                )


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare two evaluations of the same rows, by a paired test."""

    first: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FIRST")]]
    """A file that nemorl eval --output has written."""
    second: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SECOND")]]
    """Another one, of the same rows with the same prompts."""
    json: bool = False
    """Print one JSON object a line instead of a table."""
    seed: int = 0
    """Seed of the test's random signs."""

    def __post_init__(self) -> None:
        valid_seed(seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AnswerConfig):
    """Answer prompts, with the log-probability of each answer and the reason it ended."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A prompt; may be given several times."""
    file: str | None = None
    """A text file with a prompt in each line."""
    json: bool = False
    """Print one JSON object a line instead of a table."""
    seed: int | None = None
    """Seed of the sampling. Default: new answers at each call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        valid_seed(seed=self.seed)
        if not self.data.chat:
            for name, given in (
                ("model.chat_template", self.model.chat_template),
                ("model.chat_template_kwargs", self.model.chat_template_kwargs),
                ("data.system_prompt", self.data.system_prompt),
            ):
                require(not given, name, "is for --data.chat", given, "add it, or remove this")
        require(
            bool(self.prompt or self.file),
            "prompt",
            "must be given",
            self.prompt,
            'add --prompt "…" or --file prompts.txt',
        )

    def prompts(self) -> list[str]:
        if self.file is None:
            return list(self.prompt)
        try:
            lines = Path(self.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"file must be a readable text file, but {self.file} is not ({error}): give one"
                " prompt per line"
            ) from None
        found = [*self.prompt, *filter(str.strip, lines)]
        require(bool(found), "file", "must hold a prompt", self.file, "write one prompt per line")
        return found


REQUESTS_OWN = {
    "model": ("chat_template", "chat_template_kwargs"),
    "trainer": ("router_replay",),
    "generation": (
        *("temperature", "top_k", "top_p", "min_p", "max_new_tokens"),
        *("stop_strings", "stop_token_ids", "ignore_eos", "adapter_rank"),
    ),
}
"""Settings that `serve --tinker` refuses."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(LoadedConfig):
    """Serve a model or a run's to agents over HTTP, in OpenAI's and Anthropic's dialects, or with
    --tinker train it for scripts that were written for Tinker: nemorl serve MODEL.
    """

    unused: ClassVar = {name: LoadedConfig.unused[name] for name in ("model",)}

    tinker: bool = False
    """Train and sample for scripts written for Tinker, which name it by TINKER_BASE_URL."""
    dir: str = "runs/tinker"
    """With tinker: the folder of its models, requests and answers, from which it goes on."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 8000
    """0: a free one."""
    name: str | None = None
    """The model's name in requests. Default: model.path."""
    keys: str | None = None
    """A YAML file of keys, 'NAME: {key: …, role: chat}' each: chat asks the model, read sees its
    name and /metrics; with tinker the first is train, and a key begins with tml-. Default: a new
    key, which is printed once.
    """
    tls_certificate: str | None = None
    """The file of a certificate (PEM), to serve https."""
    tls_key: str | None = None
    """The file of its private key."""
    audit: str | None = None
    """A file to which each request appends a line of JSON: time, client, key's name, path, status,
    seconds and tokens.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        why, remedy = "is for --tinker", "add it"
        if self.tinker:
            why, remedy = "is not used with --tinker: requests say how they sample", "remove it"
        else:
            refuse_unused("", self, why, remedy, names=("dir",))
        for section, names in (REQUESTS_OWN if self.tinker else LoadedConfig.unused).items():
            refuse_unused(section, getattr(self, section), why, remedy, names=names)
        fits, must = 0 <= self.port < 65_536, "must be from 0 to 65535"
        require(fits, "port", must, self.port, "8000 is usual")
        both, must = bool(self.tls_key) == bool(self.tls_certificate), "must be given together"
        require(both, "tls_certificate and tls_key", must, self.tls_key, "give both, or none")
        for name in ("keys", "tls_certificate", "tls_key"):
            path = getattr(self, name)
            require(path is None or Path(path).is_file(), name, "must be a file", path, "write it")
        if self.tls_certificate:
            try:
                SSLContext(PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_certificate, self.tls_key)
            except OSError as error:
                must = "must be a certificate in PEM, and its key"
                require(False, "tls_certificate and tls_key", must, str(error), "give others")

    def read_keys(self) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
        """Return each key and role by its name, and the keys that were made now."""
        usual = "train" if self.tinker else "chat"
        if self.keys is None:
            made = {usual: ("tml-" if self.tinker else "") + token_urlsafe(24)}
            return {usual: (made[usual], usual)}, made
        found = dict[str, tuple[str, Any]]()
        for name, each in read(Path(self.keys))[0].items():
            parts = each if isinstance(each, Mapping) else {}
            key, role = str(parts.get("key") or ""), parts.get("role")
            begin = "tml-" * self.tinker  # Tinker's client sends no other
            fits = len(key) >= 16 and role in (usual, "read") and len(parts) == 2
            fits = fits and key.startswith(begin)
            must = f"must have a key of at least 16 characters, and a role, {usual} or read"
            remedy = f"write '{name}: {{key: {begin}…, role: {usual}}}'"
            require(fits, f"keys: {name}", must, [*parts], remedy)
            found[name] = key, role
        distinct = len({key for key, _ in found.values()}) == len(found) > 0
        require(distinct, "keys", "must be different keys, one or more", [*found], "write others")
        return found, {}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Turn a checkpoint of a run into a folder that transformers, vLLM and others load."""

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """The run's directory."""
    output: str
    """The folder to write."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or best: the one with the best run.metric. Default: the newest."""
    backend: str = "policy"
    """Name of the model, where a script trains several (`run.backend`)."""
    lora: Literal["merged", "adapter"] = "merged"
    """LoRA: the base model with the adapters merged into it, or a PEFT folder of the adapters."""
    base_model: str | None = None
    """LoRA: folder or hub name of the base model, where the run doesn't know it or it has moved."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base model or the run's tokenizer."""

    def __post_init__(self) -> None:
        at_least(0, step=None if self.step == "best" else self.step)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show runs, also unfinished ones, on a web page: curves, samples token by token, settings,
    warnings.

    The page is one file that needs no network.
    """

    runs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...")]]
    """The run's directory; of several, the page shows them side by side."""
    output: str | None = None
    """The .html file to write. Default: report.html in the run's directory, or comparison.html in
    the folder of several.
    """
    watch: bool = False
    """Write the page again while the run goes on; it refreshes itself in the browser."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Print what a run recorded: groups lost, doubled or open, and its receipts.

    The exit code is 1 where a receipt does not hold.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """The run's directory, also of one that crashed or still goes on."""
    json: bool = False
    """Print one JSON object per receipt in place of a table."""


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """Write a small file of data to try a command with: sums of numbers below 100."""

    file: tyro.conf.Positional[str]
    """The file to write, one JSON object a line. It must not exist."""
    kind: Literal["grpo", "sft", "dpo", "kto"] = "grpo"
    """Prompts with an answer (grpo), a response (sft), a chosen and a rejected one (dpo), or a
    labeled one (kto).
    """
    rows: int = 64
    """How many rows are written."""
    seed: int = 0
    """Seed of the numbers."""

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show training data as a model sees them: the tokens that are trained on, and lengths."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kind: Literal["auto", "prompt", "sft", "pairs", "labels"] = "auto"
    """Prompts (grpo), demonstrations (sft), preference pairs (dpo), or labeled answers (kto). auto:
    what the first row looks like.
    """
    rows: int = 3
    """How many rows are shown, from the top."""

    def __post_init__(self) -> None:
        at_least(0, rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Prove what a model can do here: rows padded and packed, prompts shared, caches, LoRA, FSDP2,
    tensor and context parallelism, …, each against plain transformers in value and gradient.

    A tiny model with random weights is made of the configuration: the model's own are not needed.
    Runs do not use what does not hold. The result is kept for these versions of packages.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """A folder or hub name of a model, a run's directory, or a config.json."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    vllm: bool = False
    """Compare vLLM's log-probabilities, too, before and after an update of weights: a minute."""
