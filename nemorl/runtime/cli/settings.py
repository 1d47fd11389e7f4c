"""The settings of the commands besides the algorithms."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nemorl.checks import at_least, refuse_unused, require, valid_seed
from nemorl.data.prompts import parts_of
from nemorl.data.sources import has_splits
from nemorl.parallel.config import ModelConfig
from nemorl.runtime.config.data import DataConfig
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.config.tree import defaults, flat, located, to_dict
from nemorl.runtime.config.trust import Trust
from nemorl.runtime.config.yaml_io import read
from nemorl.runtime.run.directory import RunDirectory

SAME = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "chat_template": "model.chat_template",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "device": "trainer.device",
    "param_dtype": "parallel.param_dtype",
    "data": "data.validation",
    "split": "data.validation_split",
    "prompt_column": "data.prompt_column",
    "prompt_template": "data.prompt_template",
    "system_prompt": "data.system_prompt",
    "chat": "data.chat",
    "answer_column": "data.answer_column",
    "max_rows": "run.max_val_samples",
    "seed": "run.seed",
    "run": "run.dir",
    "runs": "run.dir",
    "lora": "lora.export",
    "seq_len": "data.max_total_sequence_length",
    "micro_batch_rows": "trainer.train_micro_batch_size",
    "batch_rows": "train_global_batch_size",
    "tp": "parallel.tp",
    "cp": "parallel.cp",
    "dp_shard": "parallel.dp_shard",
    "dp_replicate": "parallel.dp_replicate",
    "cp_method": "parallel.cp_method",
    "activation_checkpointing": "parallel.activation_checkpointing",
    "cpu_offload": "parallel.cpu_offload",
    "logprob_chunk": "trainer.logprob_chunk",
    "packed": "trainer.sequence_packing",
    "lora_rank": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "colocated_generation": "generation.colocated",
    "generation_tp": "generation.tensor_parallel_size",
}
"""What settings of these commands are called in training: their flags have either name."""
OF_RUN = (
    *("prompt_column", "answer_column", "prompt_template", "system_prompt", "chat"),
    *("reward", "reward_weights", "reward_kwargs"),
    *("generation.max_new_tokens", "generation.ignore_eos"),
    *("generation.stop_strings", "generation.stop_token_ids"),
)
"""Settings that `eval` and `generate` take from the run that --model names."""
FOR_TRAINING = ("colocated", "sleep_level", "weight_transport", "trainer_gpus")
"""Settings of `generation` that `eval` and `generate` refuse and don't show."""


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """What `eval` and `generate` have in common."""

    model: str
    """Folder of a Hugging Face causal language model, its name on the hub, or a run's directory
    (whose columns, prompts, rewards and lengths are then the defaults).
    """
    n: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 1
    """Answers per prompt; more than one needs a temperature above 0."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. Default: the model's own."""
    chat_template: str | None = None
    """Jinja chat template, path of a file with one, or passthrough (contents as they are). Default:
    the tokenizer's own.
    """
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values for the chat template by name; those of the training are in the tokenizer already."""
    prompt_template: str | None = None
    """Text that a prompt which is a string is put into: "Question: {prompt}", or (eval) with other
    columns in braces.
    """
    system_prompt: str | None = None
    """System message put before chat messages that have none."""
    chat: bool = False
    """Give a prompt that is a string to the chat template, as the user's message."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model or the tokenizer (auto_map). It can do whatever you
    can: read it first.
    """
    device: str | None = None
    """torch: cpu, cuda, cuda:1, …. Default: the first GPU if there is one."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def __post_init__(self) -> None:
        at_least(1, n=self.n)
        if self.prompt_template is not None:
            parts_of(self.prompt_template)
        refuse_unused(
            "generation",
            self.generation,
            "is for training",
            "remove it",
            names=FOR_TRAINING,
        )
        require(
            self.generation.backend != "megatron",
            "generation.backend",
            "must be torch or vllm, as megatron generates on the ranks of a trainer",
            "megatron",
            "remove it",
        )
        require(
            self.device is None or self.generation.backend != "vllm",
            "device",
            "is not for vllm, which takes the first GPU",
            self.device,
            "remove it, and set CUDA_VISIBLE_DEVICES",
        )
        require(
            self.n == 1 or self.generation.temperature > 0,
            "n",
            "must be 1 with temperature 0",
            self.n,
            "greedy answers are all the same; add --temperature 1.0",
        )


def settings_of_run(cls: type, model: str, trust: Trust, *, rewarded: bool) -> dict[str, Any]:
    """Return the settings of the run that is the model of `eval` or `generate`, but for defaults.

    rewarded: there is another reward, so the run's with its weights and parameters is of no use.
    """
    directory = RunDirectory(Path(model))
    if not (model and directory.config.exists() and directory.holds_results()):
        return {}
    config, lines = read(directory.config)
    kwargs = "reward_kwargs"  # one value, not a section
    theirs, usual = flat(config) | {kwargs: config.get(kwargs)}, flat(defaults(cls))
    unused = ("reward", "reward_weights", kwargs) if rewarded else ()
    found = {}
    for key in (key for key in OF_RUN if key in usual and key not in unused):
        value = theirs.get(SAME.get(key, key)) or usual[key]
        found[key] = tuple(value) if isinstance(value, list) else value
    found = {key: value for key, value in found.items() if value != usual[key]}
    with located(directory.config, lines):
        trust.require(found, config)
    return found


def print_settings_of_run(of_run: Mapping[str, Any], config: Any) -> None:
    """Print to standard error which settings of a run a config has kept."""
    final = flat(to_dict(config)) | {"reward_kwargs": getattr(config, "reward_kwargs", None)}
    if kept := [f"{key} {value!r}" for key, value in of_run.items() if final[key] == value]:
        print(f"settings of the run {config.model}: {', '.join(kept)}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(AnswerConfig):
    """Answer the prompts of a data set and judge the answers by a reward."""

    data: str
    """Rows to answer: a .jsonl, .json, .parquet or .csv file, or a data set's name on the hub."""
    output: str | None = None
    """Write every answer to this .jsonl file."""
    reward: str | tuple[str, ...] = "exact_match"
    """Rewards by name, or module:function of your own, as in training."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each of several rewards. Default: 1."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values of parameters of the rewards, by name: {tolerance: 0.01}."""
    max_rows: int | None = None
    """Number of rows that are answered, from the top. Default: all."""
    split: str | None = None
    """Split of a hub data set. Default: "test"."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    seed: int = 0
    """Seed of the sampling."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(temperature=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, max_rows=self.max_rows)
        valid_seed(seed=self.seed)

    def rows(self) -> DataConfig:
        """Return where the rows come from, as a section of training has it."""
        return DataConfig(
            validation=self.data,
            validation_split=self.split or ("test" if has_splits(self.data) else None),
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            prompt_template=self.prompt_template,
            system_prompt=self.system_prompt,
            chat=self.chat,
        )


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
        if not self.chat:
            for name in ("chat_template", "chat_template_kwargs", "system_prompt"):
                given = getattr(self, name)
                require(not given, name, "is for --chat", given, "add --chat, or remove it")
        require(
            bool(self.prompt or self.file),
            "prompt",
            "must be given",
            self.prompt,
            'add --prompt "…" or --file prompts.txt',
        )

    def prompts(self) -> list[str]:
        """Return the prompts given, then those of the file without its empty lines."""
        if self.file is None:
            return list(self.prompt)
        try:
            lines = Path(self.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"file must be a readable text file, but {self.file} is not ({error}): give one"
                " prompt per line"
            ) from None
        found = [*self.prompt, *(line for line in lines if line.strip())]
        require(bool(found), "file", "must hold a prompt", self.file, "write one prompt per line")
        return found


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Turn a checkpoint of a run into a folder that transformers, vLLM and others load."""

    run: str
    """The run's directory."""
    output: str
    """The folder to write."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or best: that of the best run.metric. Default: the newest."""
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
    """Show runs on a web page: curves, samples token by token, settings, warnings.

    The page is one file that needs no network, also for a run in progress or one that crashed.
    """

    runs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...")]]
    """The run's directory; of several, the page shows them side by side."""
    output: str | None = None
    """The .html file to write. Default: report.html in the run's directory, or of several runs
    comparison.html in the folder that holds them.
    """
    watch: bool = False
    """Write the page again while the run goes on, and let it refresh itself in the browser."""


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """Write a small file of data to try a command with: sums of numbers below 100."""

    file: tyro.conf.Positional[str]
    """The file to write, one JSON object a line. It must not exist."""
    kind: Literal["grpo", "sft", "dpo", "kto"] = "grpo"
    """Prompts with an answer (grpo), with a response (sft), with a chosen and a rejected response
    (dpo), or with a labeled response (kto).
    """
    rows: int = 64
    """How many rows are written."""
    seed: int = 0
    """Of the numbers."""

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show training data as a model sees them: the tokens that are trained on, and lengths."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kind: Literal["auto", "prompt", "sft", "pairs", "labels"] = "auto"
    """Prompts (grpo), demonstrations (sft), preference pairs (dpo), or single answers with a label
    (dpo --loss kto). auto: what the first row looks like.
    """
    rows: int = 3
    """How many rows are shown, from the top."""

    def __post_init__(self) -> None:
        at_least(0, rows=self.rows)
