"""What `nemorl eval`, `nemorl generate` and `nemorl export` are asked for, and how their answers
are shown. Free of torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nemorl.checks import at_least, require
from nemorl.parallel.config import ModelConfig
from nemorl.runtime.config.base import DataConfig, GenerationConfig


def _greedy() -> GenerationConfig:
    return GenerationConfig(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Answer the prompts of a data set and judge the answers by a reward."""

    model: str
    """A folder with a Hugging Face causal language model, its name on the hub, or a run directory
    (its export is taken).
    """
    data: str
    """Rows to answer: a local .jsonl, .json, .parquet or .csv file, or the name of a data set on
    the hub.
    """
    output: str | None = None
    """Write every answer to this .jsonl file."""
    reward: str | tuple[str, ...] = "exact_match"
    """Rewards by name, or module:function of your own, as in training."""
    reward_weights: tuple[float, ...] = ()
    """One for each of several rewards; all 1 unless given."""
    n: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 1
    """Answers per prompt; more than one wants a temperature above 0."""
    max_rows: int | None = None
    """Only the first this many rows."""
    split: str | None = None
    """The split that is taken of a hub data set; "test" unless given."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_column: str = "answer"
    """Column that rewards such as exact_match compare the response with."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; the model's own unless given."""
    chat_template: str | None = None
    """A Jinja chat template, the path of a file with one, or passthrough (contents as they are);
    the tokenizer's own unless given.
    """
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values that the chat template asks for by name; those that a model was trained with are in
    its tokenizer already.
    """
    seed: int = 0
    """Of the sampling, where temperature is above 0."""
    device: str | None = None
    """torch: cpu, cuda, cuda:1, …; the first GPU if there is one unless given."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in."""
    generation: tyro.conf.OmitArgPrefixes[GenerationConfig] = field(default_factory=_greedy)

    def __post_init__(self) -> None:
        at_least(1, n=self.n, max_rows=self.max_rows)
        at_least(0, seed=self.seed)
        _check_engine(self.n, self.device, self.generation)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Ask a model: answers to prompts, with their log-probability and the reason they ended."""

    model: str
    """A folder with a Hugging Face causal language model, its name on the hub, or a run directory
    (its export is taken).
    """
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A prompt; may be given several times."""
    file: str | None = None
    """A text file with a prompt in each line."""
    n: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 1
    """Answers per prompt; more than one wants a temperature above 0."""
    json: bool = False
    """Print one JSON object a line instead of a table."""
    chat: bool = False
    """Send each prompt as a user's message through the chat template."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; the model's own unless given."""
    chat_template: str | None = None
    """A Jinja chat template, the path of a file with one, or passthrough (contents as they are);
    the tokenizer's own unless given.
    """
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values that the chat template asks for by name; those that a model was trained with are in
    its tokenizer already.
    """
    seed: int | None = None
    """Makes sampling repeatable; new answers at each call unless given."""
    device: str | None = None
    """torch: cpu, cuda, cuda:1, …; the first GPU if there is one unless given."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in."""
    generation: tyro.conf.OmitArgPrefixes[GenerationConfig] = field(
        default_factory=GenerationConfig
    )

    def __post_init__(self) -> None:
        at_least(1, n=self.n)
        at_least(0, seed=self.seed)
        for name in ("chat_template", "chat_template_kwargs"):
            require(
                self.chat or not getattr(self, name),
                name,
                "is for --chat",
                getattr(self, name),
                "add --chat, or leave it out",
            )
        require(
            bool(self.prompt or self.file),
            "prompt",
            "must be given",
            self.prompt,
            'add --prompt "…" or --file prompts.txt',
        )
        _check_engine(self.n, self.device, self.generation)

    def prompts(self) -> list[str]:
        """The prompts given, then those of the file (empty lines left out)."""
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
    """The step whose checkpoint is taken, or best: that of the best run.metric; the newest one
    unless given.
    """
    lora: Literal["merged", "adapter"] = "merged"
    """Of a run with LoRA: the base model with the adapters merged into it, or a PEFT folder of the
    adapters alone.
    """
    base_model: str | None = None
    """Of a run with LoRA: folder or hub name of the base model, where the run doesn't know it or it
    has moved.
    """

    def __post_init__(self) -> None:
        at_least(0, step=None if self.step == "best" else self.step)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run on a web page: curves, samples token by token, settings, warnings. One file that
    needs no network.

    Works for a run in progress and for one that crashed, too.
    """

    run: tyro.conf.Positional[str]
    """The run's directory."""
    output: str | None = None
    """The .html file to write; report.html in the run's directory unless given."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Look at training data as a model sees them: which tokens are trained on, and how long the
    rows are.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kind: Literal["auto", "prompt", "sft", "pairs", "labels"] = "auto"
    """What the rows are for: prompts (grpo), demonstrations (sft), preference pairs (dpo), single
    answers with a label (dpo --loss kto). auto: what the first row looks like.
    """
    rows: int = 3
    """How many rows are shown, from the top."""

    def __post_init__(self) -> None:
        at_least(0, rows=self.rows)


def _check_engine(n: int, device: str | None, generation: GenerationConfig) -> None:
    remedy = (
        "leave it out, and set the variable CUDA_VISIBLE_DEVICES to the GPUs that vLLM is to see"
    )
    require(
        device is None or generation.backend != "vllm",
        "device",
        "is not for vllm, which takes the first GPU",
        device,
        remedy,
    )
    require(
        n == 1 or generation.temperature > 0,
        "n",
        "must be 1 with temperature 0",
        n,
        "greedy answers are all the same; add --temperature 1.0",
    )


def print_evaluation(config: EvalConfig, result: dict[str, Any], *, shown: int = 8) -> None:
    """The scores, and the first few answers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    sampling = (
        "greedy"
        if config.generation.temperature == 0
        else f"temperature {config.generation.temperature:g}, {config.n} per prompt"
    )
    answers = result["answers"]
    if answers:
        table = Table(
            title=f"the first {min(shown, len(answers))} of {len(answers)} answers",
            title_justify="left",
        )
        for name in ("prompt", "response", "answer"):
            table.add_column(name, overflow="fold")
        table.add_column("reward", justify="right")
        for row in answers[:shown]:
            cells = (Text(_short(row[name])) for name in ("prompt", "response", "answer"))
            table.add_row(
                *cells, Text(f"{row['reward']:g}", style="green" if row["reward"] > 0 else "red")
            )
        console.print(table)
    scores = Table(title=f"{config.model} on {config.data} ({sampling})", title_justify="left")
    parts = {name: f"{value:.4f}" for name, value in result.items() if name.startswith("reward/")}
    shown_scores = {
        "accuracy": f"{result['accuracy']:.1%}",
        "reward": f"{result['reward']:.4f}",
        **parts,
    }
    shown_scores |= {
        "response length": f"{result['response_length']:.1f}",
        "rows": str(result["num_rows"]),
    }
    for name in shown_scores:
        scores.add_column(name, justify="right")
    scores.add_row(*shown_scores.values())
    console.print(scores)


def print_generations(config: GenerateConfig, completions: Sequence[dict[str, Any]]) -> None:
    """A table of answers, or one JSON object a line."""
    if config.json:
        for completion in completions:
            print(json.dumps(completion, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("prompt", "response"):
        table.add_column(name, overflow="fold")
    for name in ("logprob", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("finish")
    previous = None
    for row in completions:
        if previous is not None and row["prompt"] != previous:
            table.add_section()
        prompt = "" if row["prompt"] == previous else row["prompt"]
        table.add_row(
            Text(prompt),
            Text(row["response"]),
            f"{row['logprob']:.2f}",
            str(row["num_tokens"]),
            row["finish_reason"],
        )
        previous = row["prompt"]
    Console().print(table)


def write_answers(path: str, answers: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers),
        encoding="utf-8",
    )


def _short(value: Any, limit: int = 200) -> str:
    text = (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= limit else text[: limit - 1] + "…"
