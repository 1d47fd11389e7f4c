"""What people get wrong, in one table: errors name the field or file, what was wrong, what helps.

No case may leave results behind or spoil those of an earlier run.
"""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import nemorl
from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.cli import main as cli
from nemorl.runtime.store import checkpoint
from nemorl.runtime.store.checkpoint import CheckpointError
from tests.runtime.run.mishaps import FailsOnce
from tests.runtime.runs import (
    addition_rows,
    dpo_config,
    grpo_config,
    rm_config,
    rows_file,
    saved_model,
    sft_config,
)
from tests.tiny_models import tiny_model, tiny_tokenizer
from tools.from_nemo_rl import translate


@dataclass(frozen=True)
class Place:
    """A case's own folder, with a model, rows and a finished run within reach."""

    folder: Path
    shared: Path

    @property
    def model(self) -> str:
        return str(self.shared / "model")

    @property
    def rows(self) -> str:
        return str(self.shared / "rows.jsonl")

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def write(self, name: str, content: str) -> str:
        path = self.folder / name
        path.write_text(content)
        return str(path)

    def config(self, make: Callable[..., Any], **options: Any) -> Any:
        """A config that works, but for `options`; a dict replaces fields of a section."""
        config = make(self.run_folder, steps=1)
        data = replace(config.data, train=self.rows)
        config = replace(config, model=nemorl.ModelConfig(path=self.model), data=data)
        sections = {
            name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
            for name, value in options.items()
        }
        return replace(config, **sections)

    def grpo(self, **options: Any) -> Any:
        return self.config(grpo_config, **{"reward": "contains_answer", **options})

    def sft(self, **options: Any) -> Any:
        return self.config(sft_config, **options)

    def dpo(self, **options: Any) -> Any:
        return self.config(dpo_config, **options)

    def rm(self, **options: Any) -> Any:
        return self.config(rm_config, **options)


@dataclass(frozen=True)
class Case:
    message: str
    """What the error says, as a regular expression."""
    provoke: Callable[[Place], Any]
    error: type[BaseException] = ValueError
    saved: int | None = None
    """The step whose checkpoint is there afterwards, for errors in the midst of a run."""


def setting(message: str, section: Callable[..., Any], **values: Any) -> Case:
    return Case(message, lambda place: section(**values))


def config(message: str, **options: Any) -> Case:
    """A config of GRPO with these options can't be made."""
    return Case(message, lambda place: place.grpo(**options))


def run(
    make: Callable[..., Any],
    message: str,
    given: dict[str, Any] | None = None,
    *,
    error: type[BaseException] = ValueError,
    saved: int | None = None,
    **options: Any,
) -> Case:
    """A run with these options, and objects `given` to it."""
    return Case(
        message, lambda place: nemorl.run(make(place, **options), **(given or {})), error, saved
    )


sft, grpo, dpo, rm = (partial(run, make) for make in (Place.sft, Place.grpo, Place.dpo, Place.rm))


def rows(message: str, given: Any, **data: Any) -> Case:
    return sft(message, {"train": given}, data={"train": None, **data})


def reward(message: str, given: Any, **options: Any) -> Case:
    return grpo(message, {"reward": given}, **options)


def file(message: str, name: str, content: str) -> Case:
    """SFT on a file of rows."""
    return Case(
        message, lambda place: nemorl.run(place.sft(data={"train": place.write(name, content)}))
    )


def yaml(message: str, text: str) -> Case:
    return Case(
        message,
        lambda place: nemorl.load_config(nemorl.GRPOConfig, place.write("settings.yaml", text)),
    )


class Refused(Exception):
    """What the command line printed before it ended with an exit code."""


def command(*arguments: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        code = cli.main(list(arguments))
    text = printed.getvalue()
    assert "Traceback" not in text
    if code:
        raise Refused(" ".join(text.replace("│", " ").split()))


def flags(message: str, line: str) -> Case:
    return Case(message, lambda place: command(*line.format(place=place).split()), Refused)


def model(
    message: str, spoil: Callable[[Path], Any], make: Callable[..., Any] = Place.sft, **of: Any
) -> Case:
    """A run of a model folder that is spoiled."""

    def provoke(place: Place) -> None:
        folder = shutil.copytree(place.model, place.folder / "model")
        spoil(folder)
        nemorl.run(make(place, model={"path": str(folder), "tokenizer": place.model}))

    return Case(message, provoke, **of)


def tokenizer(reason: str, name: str, content: str | dict[str, Any] | None) -> Case:
    """A run whose tokenizer lacks a file (None), or has another, or other settings in it."""

    def provoke(place: Place) -> None:
        folder = shutil.copytree(place.model, place.folder / "tokenizer")
        if isinstance(content, dict):
            json_with(folder / name, **content)
        else:
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_text(content)
        nemorl.run(place.sft(model={"tokenizer": str(folder)}))

    message = r"model\.tokenizer must be a folder with a Hugging Face tokenizer or a hub name, but "
    return Case(rf"{message}.*could not be loaded \({reason}", provoke)


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def pickled(content: Any) -> Callable[[Path], None]:
    """Put a pickle, or bytes that are none, in the place of the safetensors."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        file = folder / "pytorch_model.bin"
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)

    return spoil


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def json_with(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_run(
    message: str, provoke: Callable[[Place, Path], Any], error: type[BaseException] = ValueError
) -> Case:
    """A run of one step of SFT is in the run's folder, and must be as it was afterwards."""
    return Case(
        message,
        lambda place: provoke(place, shutil.copytree(place.shared / "finished", place.run_folder)),
        error,
    )


def resumed(message: str, given: dict[str, Any] | None = None, **options: Any) -> Case:
    resume = {"resume": True, **options}
    return with_run(
        message,
        lambda place, run: nemorl.run(place.sft(run=resume, max_num_steps=2), **(given or {})),
    )


def resumed_damaged(name: str, change: Callable[[Path], Any]) -> Case:
    def provoke(place: Place, run: Path) -> None:
        change(run / "checkpoints" / "step_1" / name)
        nemorl.run(place.sft(run={"resume": True}, max_num_steps=2))

    return with_run(
        r"run\.resume needs a whole checkpoint, but none in .* is: put one back, or start again in"
        r" another folder",
        provoke,
        CheckpointError,
    )


def export(message: str, **options: Any) -> Case:
    return with_run(
        message,
        lambda place, run: nemorl.export(run=str(run), output=str(place.folder / "out"), **options),
    )


SECTIONS: dict[Callable[..., Any], dict[str, dict[str, Any]]] = {
    nemorl.OptimizerConfig: {
        r"optimizer\.lr must be positive, but it is -1e-05: 1e-6 to": {"lr": -1e-5},
        r"optimizer\.min_lr_ratio must lie in 0 … 1, but it is 2: 0\.1": {"min_lr_ratio": 2},
    },
    nemorl.TrainerConfig: {
        r"trainer\.packed_row_tokens needs trainer\.sequence_packing, but it is 64: add"
        r" --trainer": {"packed_row_tokens": 64},
    },
    nemorl.GenerationConfig: {
        r"generation\.max_new_tokens must be at least 1, but it is 0: use 1": {"max_new_tokens": 0},
        r"generation\.num_replicas is not for torch, .*but it is 2: add --generation\.backend"
        r" vllm": {"num_replicas": 2},
        r"temperature must be .*but it is -1": {"temperature": -1.0},
    },
    SamplingParams: {
        r"^seed must be below 2\^63, but it is 9223372036854775808: use": {"seed": 2**63},
    },
    nemorl.RunConfig: {
        r"run\.seed must be below 2\^63, but it is 100000000000000000000000: use": {"seed": 10**23},
        r"run\.dir must be given to resume a run, but it is None: name": {"resume": True},
        r"run\.async_save can't be given together with run\.metric, .* keep one of the two": {
            "async_save": True,
            "metric": "val_accuracy",
        },
    },
    nemorl.ClippedLoss: {
        r"loss\.dual_clip must be above 1 or None, but it is 0\.5: 3 is usual": {"dual_clip": 0.5},
    },
    nemorl.SAPOLoss: {r"loss\.temperature_negative must be at": {"temperature_negative": 0.0}},
    nemorl.GMPOLoss: {r"loss\.clip_low must be at least 0": {"clip_low": -0.1}},
    nemorl.PassAtKAdvantage: {r"advantage\.k must be at least 1": {"k": 0}},
    nemorl.DPOLoss: {r"loss\.divergence must lie in 0 … 1": {"divergence": 1.5}},
    nemorl.KLConfig: {
        r"kl\.coef must be at least 0, but it is -0\.1: use 0": {"coef": -0.1},
    },
    nemorl.OffPolicyConfig: {
        r"off_policy\.min must be at least 0 and below off_policy\.max, but it is"
        r" 3.*off_policy\.max is 2": {"min": 3.0, "max": 2.0},
    },
    nemorl.OverlongConfig: {
        r"overlong\.buffer must lie in 0 … 1, but it is 512: DAPO's is 0\.2": {"buffer": 512},
    },
    nemorl.ParallelPlan: {
        r"parallel\.tp must be at least 1, but it is 0: use 1": {"tp": 0},
    },
    nemorl.ProfileConfig: {
        r"profile\.steps must be FIRST:LAST, counted from 1, but it is '0:3': 10:12 records three"
        r" steps": {"steps": "0:3"},
    },
    nemorl.RuntimeConfig: {
        r"runtime\.max_restarts must be at least 0, but it is -1: use 0": {"max_restarts": -1},
    },
}
OF_GRPO: dict[str, dict[str, Any]] = {
    r"num_generations_per_prompt must be at least 2"
    r" .*but it is 1: use 2 or more": {"num_generations_per_prompt": 1},
    r"dynamic_sampling needs num_generations_per_prompt of at least 2: .*but it is True: turn it"
    r" off": {
        "num_generations_per_prompt": 1,
        "dynamic_sampling": True,
        "advantage": {"baseline": "batch_mean", "scale": "batch_std"},
    },
    r"train_global_batch_size must divide the 24"
    r" responses of a rollout batch \(.*\), but it is 7:"
    r" all optimizer steps are of one size": {"train_global_batch_size": 7},
    r"generation\.temperature must be above 0 for training, but it is 0\.0: 1\.0 is"
    r" usual": {"generation": {"temperature": 0.0}},
}
# Settings of several devices, against the model and each other: before a process is started
DEVICES = [
    sft(
        r"parallel must suit the model, but parallel\.tp 3 does not divide the model's"
        r" num_attention_heads 4; .*parallel.tp may be",
        parallel={"tp": 3},
        runtime={"oversubscribe": True},
    ),
    sft(
        r"model must be a folder or a hub name, .*, but it is 'Qwen2ForCausalLM':"
        r" save_pretrained",
        {"model": tiny_model(), "tokenizer": tiny_tokenizer()},
        parallel={"dp_shard": 2},
    ),
    sft(
        r"profile\.steps must begin within the 1 optimizer steps of the run, but it is '2:3': name"
        r" earlier steps",
        profile={"steps": "2:3"},
    ),
]

YAML = {
    r"line 3: unknown key loss\.clip_low.*keys"
    r" of loss reinforce": "loss:\n  name: reinforce\n  clip_low: 0.1\n",
    r"line 2: loss\.name must be one of clipped, .*but it is 'gsop'; did"
    r" you mean gspo\?": "loss:\n  name: gsop\n",
    r"settings\.yaml, line \d: not valid YAML:": "optimizer: {lr: 1\n",
    r"line 2: profile\.steps must be a valid string, but it is 10: write"
    r" \"10\", with quotes": "profile:\n  steps: 10\n",
}


def command_with_rows(place: Place) -> None:
    """The terminal shows a line, the log where the error came from."""
    rows = place.write("rows.jsonl", '{"prompt": "1+1="}\n')
    line = f"sft --model.path {place.model} --data.train {rows} --run.dir {place.run_folder}"
    try:
        command(*line.split(), "--trainer.device", "cpu")
    finally:
        assert "Traceback" in (place.run_folder / "log.jsonl").read_text()


NO_RUN = (
    r"error: runs? must be the folder of a run, but no/run holds no config\.yaml.*check the path"
)
FLAGS = {
    NO_RUN: "report no/run",
    r"gpus must allow a plan.*: the degrees given do not multiply to a divisor"
    r" of 4": "plan --model {place.model} --gpus 4 --tp 3",
    r"data\.train must be given, but it is None: add --data\.train FILE": "data inspect",
    r"unknown command 'gpro'; did you mean grpo\? Commands: ": "gpro",
    r"--loss\.clip-low is not a setting of loss"
    r" reinforce: .*belongs to clipped.*add"
    r" --loss clipped": "grpo --loss reinforce --loss.clip-low 0.1",
    r"model\.path must be given, but it is '': add --model\.path"
    r" with a folder": "grpo --data.train {place.rows}",
    r"data\.train must name rows to train on: add"
    r" --data\.train FILE": "grpo --model.path {place.model}",
    r"run\.dir must be given to resume a run": "sft --model.path m --data.train d --run.resume",
    r"n must be 1 with temperature 0.*add --temperature 1\.0": "eval --model m --validation d -n 2",
    r"prompt must be given, but it is \(\): add --prompt": "generate --model m",
    r"chat_template is for --data\.chat": "generate --model m --prompt p --chat-template t",
    r"file must be a readable text file, but no\.txt is"
    r" not.*give one prompt": "generate --model {place.model} --file no.txt",
    r"there is no folder no/such/model\):"
    r" check the path": "generate --model no/such/model --prompt 1",
    r"data\.train must name an existing file, but it is 'no/rows\.jsonl': check"
    r" the path": "sft --model.path {place.model} --data.train no/rows.jsonl",
}
NO_FILE = r"can't read the config file no\.yaml: No such file"
COMMANDS = [
    Case(
        r"unknown algorithm 'gpro'; did you mean grpo\? Valid",
        lambda place: nemorl.train(model=place.model, dataset=place.rows, algorithm="gpro"),
    ),
    Case(NO_FILE, lambda place: nemorl.load_config(nemorl.SFTConfig, "no.yaml")),
    Case(NO_FILE, lambda place: translate("no.yaml")),
    Case(
        r"nemorl sft: error: .*rows\.jsonl, line 1: response must be text or messages, got None"
        r" .*data\.response_column",
        command_with_rows,
        Refused,
    ),
]


LINE = '{"prompt": "1+1=", "response": "2", "answer": "2"}\n'
ROW = json.loads(LINE)
LONG = {"prompt": "1" * 40, "response": "2"}


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": c} for role, c in zip(roles, contents, strict=False)]


PAIR = {"prompt": "1", "chosen": "2", "rejected": "3"}
DATA = [
    *(
        rm(
            rf"row 2: margin must be a number, at least 0, in all rows .* is {margin!r}",
            {"train": [{**PAIR, "margin": 1}, {**PAIR, "margin": margin}]},
        )
        for margin in (None, -1.5, "much")
    ),
    rm(r"centering must be at least 0, but it is -1", centering=-1),
    rm(
        r"trainer\.packed_row_tokens must hold the longest pair.*make it 66 or more",
        trainer={"sequence_packing": True, "packed_row_tokens": 65},
    ),
    rm(r"lora\.rank must be off for a scalar head", {"train": [PAIR]}, lora={"rank": 2}),
    rm(r"generation\.temperature can't be set for rm", generation={"temperature": 0.5}),
    dpo(
        r"row 1: label must be true or false, got 'maybe' \(data\.label_column",
        {"train": [{"prompt": "1", "response": "2", "label": "maybe"}]},
        loss=nemorl.KTOLoss(),
    ),
    file(r"rows\.jsonl, line 2: not JSON .*column", "rows.jsonl", LINE + '{"prompt": "1+1=",\n'),
    file(
        r"rows\.jsonl, line 2: text must be Unicode, but it has half a character .*'\\ud800'",
        "rows.jsonl",
        LINE + '{"prompt": "\\ud800", "response": "2"}\n',
    ),
    rows(r"data\.train must name rows to train on|holds no rows", []),
    rows(
        r"data\.prompt_column.* is 'promt', but row 1 has the columns .*did you mean prompt\?",
        [ROW],
        prompt_column="promt",
    ),
    rows(
        r"row 2: a row needs a prompt .*got columns response; name its column with prompt_column",
        [ROW, {"response": "2"}],
    ),
    rows(
        r'row 1: messages must be a list of messages like \{"role": "user"',
        [{"messages": [{"content": "hi"}]}],
    ),
    rows(r"row 1: .*assistant", [{"messages": messages("hi")}]),
    rows(r"row 2: .*tokens.*max.*32", [ROW, LONG]),
    sft(
        r"data\.held_out.* must leave at least one of the 40 rows on each side, got 40",
        data={"held_out": 40},
    ),
    sft(
        r"data\.held_out is for runs without rows to validate on, but it is 4: omit it",
        {"validation": [ROW]},
        data={"held_out": 4},
    ),
    sft(
        r"data\.validation must name an existing file, but it is 'no\.jsonl': check the path",
        data={"validation": "no.jsonl"},
    ),
    sft(
        r"data\.weights must be as many as there are training sets \(1\), but it is \(1\.0,"
        r" 2\.0\)",
        data={"weights": (1.0, 2.0)},
    ),
    grpo(
        r"generation\.max_new_tokens must be below data\.max_total_sequence_length \(32\), but it"
        r" is 32: leave room",
        generation={"max_new_tokens": 32},
    ),
]


def tokenizer_without_end() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


CHAT = {"train": [{"messages": messages("1+1=", "2")}]}
WITH_NAN = tensors(lambda found: next(iter(found.values())).fill_(float("nan")))
MODELS = [
    sft(
        r"row 1: messages need a chat template.*pass chat_template \(--model\.chat-template\)",
        CHAT,
    ),
    sft(
        r"row 1: the chat template refuses .*user, assistant: division by zero",
        CHAT,
        model={"chat_template": "{{ 1 / 0 }}"},
    ),
    sft(r"eos|end-of-sequence", {"tokenizer": tokenizer_without_end()}),
    sft(
        r"model\.tokenizer must be made for the model, which has embeddings for the tokens 0 … 7,"
        r" but one of its tokens is 41: name",
        {"model": tiny_model(vocab_size=8)},
    ),
    sft(r"model\.path must name a model folder.*give --model\.path", model={"path": ""}),
    model(
        r"model\.path must be a folder with a Hugging Face model or a hub name, but '.*' could not"
        r" be loaded",
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    ),
    model(
        r"the model's weights must not be quantized, but it is 'gptq': take the checkpoint that",
        lambda folder: json_with(
            folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
        ),
    ),
    model(r"model\.path.*could not be loaded", lambda folder: half(folder / "model.safetensors")),
    model(
        r"model\.path must be .*could not be loaded \(its weights lack model\.layers.*, 1 in all\):"
        r" check it",
        tensors(lambda found: found.pop("model.layers.1.mlp.up_proj.weight")),
    ),
    model(
        r"could not be loaded \(its weights are a damaged pickle, or one that would run code\):"
        r" ask its author for model\.safetensors",
        pickled({"weight": Fraction(1, 2)}),
    ),
    model(
        r"its model\.embed_tokens\.weight is \[42, 32\], where config\.json wants \[77, 32\]",
        lambda folder: json_with(folder / "config.json", vocab_size=77),
    ),
    model(
        r"model\.path .*\(config\.json is not a JSON object\): check it",
        lambda folder: (folder / "config.json").write_text("null"),
    ),
    tokenizer(r"tokenizer\.json is not a JSON object", "tokenizer.json", "[]"),
    tokenizer(r"it has no tokenizer\.json, and no tokens for text", "tokenizer.json", None),
    tokenizer("TypeError: Special token eos_token", "tokenizer_config.json", {"eos_token": 3}),
    model(
        r"the loss of optimizer step 1 must be finite, but it is nan: the weights were left as"
        r" they are",
        WITH_NAN,
        error=FloatingPointError,
    ),
    model(r"logits.*not finite.*weights", WITH_NAN, Place.grpo, error=FloatingPointError),
    sft(
        r"chat_template_kwargs are for a chat template, but the tokenizer has none, got .*add"
        r" model\.chat_template",
        model={"chat_template_kwargs": {"thinking": False}},
    ),
    Case(
        r"tokenizer must be given with a loaded model .*pass tokenizer=",
        lambda place: nemorl.train(model=tiny_model(), dataset=place.rows, reward_fn="exact_match"),
    ),
    grpo(
        r"generation\.max_model_len must be at least data\.max_total_sequence_length \(32\), but it"
        r" is 16: lower that one",
        {"model": tiny_model(hidden_size=128, head_dim=32)},
        generation={"backend": "vllm", "max_model_len": 16},
    ),
    sft(
        r"unknown training backend 'dtenser'; did you mean dtensor\? Valid names",
        trainer={"backend": "dtenser"},
    ),
]


def wrong_key(prompt: str, response: str) -> float:
    return {"1": 1.0}["2"]


async def asynchronous(prompt: str, response: str) -> float:
    return 0.0


TWO = ["exact_match", "contains_answer"]
REWARDS = [
    reward(
        r"reward must be one of .*, or module:function, but it is 'exact_mach'; did you mean"
        r" exact_match\?",
        "exact_mach",
    ),
    reward(
        r"reward must name a module or a \.py file, but there is no module 'no_module' in",
        "no_module:fn",
    ),
    reward(
        r"wants the column 'level', but .*line 1 has only \['answer', 'prompt', 'response'\]:"
        r" add it",
        lambda prompt, response, level: 0.0,
    ),
    reward(
        r"This was reward 'wrong_key' for prompt '\d\+\d=' and response",
        wrong_key,
        error=KeyError,
    ),
    reward(
        r"must be a finite number, but it is nan for prompt '\d\+\d=' and response .*return 0\.0",
        lambda prompt, response: float("nan"),
    ),
    reward(
        r"must be a plain function of one response to be judged in processes, but it is 'async'",
        nemorl.judged_in_processes()(asynchronous),
    ),
    reward(
        r"line 1: environment must name the row's .*\(a\), but it is None: add the column",
        {"a": "exact_match"},
    ),
    reward(
        r"must have names that rows choose, which name a, but it is \['b'\]: remove it",
        {"a": "exact_match", "b": "math"},
        data={"environments": ("a",)},
    ),
    reward(
        r"data\.environments must be as many as there are sets \(1\), but it is \('a', 'b'\)",
        {"a": "exact_match", "b": "math"},
        data={"environments": ("a", "b")},
    ),
    reward(
        r"data\.environments needs a mapping as reward or rollout\.environment, but it is \('a',\)",
        "exact_match",
        data={"environments": ("a",)},
    ),
]


def another_format(place: Place, run: Path) -> None:
    folder = run / "checkpoints" / "step_1"
    json_with(folder / "manifest.json", format=99)
    checkpoint.verify(folder)


RUNS = [
    sft(r"unknown logger 'wandbb'; did you mean wandb\? Valid names", run={"loggers": ("wandbb",)}),
    Case(
        r"the judge is out",
        lambda place: nemorl.run(place.grpo(max_num_steps=2), reward=FailsOnce(24 + 5)),
        RuntimeError,
        saved=1,
    ),
    with_run(
        r"run\.dir must be a folder without a run, but .* already holds one: resume it"
        r" \(--run\.resume\)",
        lambda place, run: nemorl.run(place.sft()),
    ),
    Case(
        r"run\.dir must be a folder that can be written to, but .*file can't.*name another",
        lambda place: nemorl.run(place.sft(run={"dir": place.write("file", "")})),
    ),
    with_run(
        r"run\.dir must be the folder of a run of grpo, but it is 'one of sft':"
        r" nemorl sft .* resumes it",
        lambda place, run: nemorl.run(place.grpo(run={"resume": True})),
    ),
    with_run(
        r"run\.seed must stay as it was when a run is resumed \(0\), but it is 5: omit it",
        lambda place, run: nemorl.run(
            place.sft(run={"resume": True, "seed": 5}, model={"chat_template": "{{ messages }}"})
        ),
    ),
    resumed(
        r"must be of the model in use, but differs in .*name the model of that run",
        {"model": tiny_model(hidden_size=16)},
    ),
    resumed_damaged("policy/model.safetensors", half),
    resumed_damaged("manifest.json", lambda path: (path.unlink(), os.mkfifo(path))),
    with_run(
        r"it has format 99, and this version of nemorl reads format 4",
        another_format,
        CheckpointError,
    ),
    sft(
        r"run\.stop_when must name a metric that the run has, but it is 'acuracy': .*there are ",
        run={"stop_when": "acuracy > 1"},
        saved=1,
    ),
    sft(
        r"run\.stop_when must be a metric of the training where there is no validation, but it"
        r" is 'val_loss < 1': give data\.validation",
        run={"stop_when": "val_loss < 1"},
    ),
    export(
        r"step must be the step of a checkpoint in .*, but there is none for best:"
        r" there are step_1 and no run\.metric that ranks them",
        step="best",
    ),
    with_run(
        r"model must have been exported, but the run .* has no hf/ yet: nemorl export --run",
        lambda place, run: nemorl.generate(run, "1"),
    ),
]


CASES = [
    *(
        setting(message, section, **values)
        for section, cases in SECTIONS.items()
        for message, values in cases.items()
    ),
    *(config(message, **options) for message, options in OF_GRPO.items()),
    *(yaml(message, text) for message, text in YAML.items()),
    *(flags(message, line) for message, line in FLAGS.items()),
    *(*DEVICES, *COMMANDS, *DATA, *MODELS, *REWARDS, *RUNS),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A model folder, a file of rows, and a finished run of one step."""
    folder = tmp_path_factory.mktemp("shared")
    saved_model(folder / "model")
    rows_file(folder / "rows.jsonl", addition_rows())
    nemorl.run(Place(folder, folder).sft(run={"dir": str(folder / "finished")}))
    return folder


def results(run: Path) -> dict[str, bytes]:
    """What nobody may lose of a run."""
    kept = [
        run / "metrics.jsonl",
        *(run / "samples").glob("*"),
        *(run / "checkpoints").rglob("*.safetensors"),
        *(run / "hf").glob("*"),
        *(run / "tokenizer").glob("*"),
    ]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in kept if path.is_file()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message.replace("\\", "")[:60])
def test_bad_input(case: Case, shared: Path, tmp_path: Path, monkeypatch):
    place = Place(tmp_path, shared)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(case.error) as caught:
        case.provoke(place)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(case.message, text, re.DOTALL), text
    assert not (tmp_path / "runs").exists(), "a folder that nobody named"
    after = results(place.run_folder)
    if case.saved is not None:
        assert checkpoint.latest(place.run_folder).name == f"step_{case.saved}"
        assert (
            f"a checkpoint of step {case.saved}: resume from it with --run.dir {place.run_folder}"
            " --run.resume" in text
        )
    elif any("tokenizer" not in name for name in after):
        before = results(shared / "finished")
        assert (after.keys(), after["metrics.jsonl"]) == (before.keys(), before["metrics.jsonl"])
