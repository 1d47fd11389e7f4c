"""What people get wrong, in one table. Each case is refused with an error that names the field or
the file, says what was wrong, and how to go on.

No case may leave results behind or spoil those of an earlier run, and what was trained before an
error is kept.
"""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import nemorl
from nemorl.rollout.signature import read_signature
from nemorl.runtime.cli import main as cli
from nemorl.runtime.run import checkpoint
from nemorl.runtime.run.checkpoint import CheckpointError
from nemorl.runtime.run.lock import locked
from tests.runtime.runs import addition_rows, dpo_config, grpo_config, sft_config
from tests.runtime.start.test_robustness import FailsOnce
from tests.tiny_models import tiny_model, tiny_tokenizer
from tools.from_nemo_rl import translate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Place:
    """Where a case happens: a folder of its own, with a model, rows and a finished run within
    reach.
    """

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

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def config(self, make: Callable[..., Any], **options: Any) -> Any:
        """A config that works, but for `options`, which are those of `replace`; a dict replaces
        fields of a section.
        """
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

    def finished_run(self) -> Path:
        """A run of one step of SFT in the run's folder."""
        shutil.copytree(self.shared / "finished", self.run_folder)
        return self.run_folder

    def resumed(self, **options: Any) -> Any:
        return self.sft(run={"resume": True}, max_num_steps=2, **options)


@dataclass(frozen=True)
class Case:
    provoke: Callable[[Place], Any]
    message: str
    """What the error says, as a regular expression."""
    error: type[BaseException] = ValueError
    saved: int | None = None
    """The step whose checkpoint is there afterwards, for errors in the midst of a run."""


class Refused(Exception):
    """What the command line printed before it ended with code 2 (or 1)."""


def command(*arguments: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        code = cli.main(list(arguments))
    text = printed.getvalue()
    assert "Traceback" not in text
    if code:
        raise Refused(" ".join(text.replace("│", " ").split()))


# ---- Settings, as dataclasses check them


def setting(message: str, section: Callable[..., Any], **values: Any) -> Case:
    return Case(lambda place: section(**values), message)


def grpo_setting(message: str, **options: Any) -> Case:
    return Case(lambda place: place.grpo(**options), message)


SETTINGS = {
    "learning rate of the wrong sign": setting(
        r"optimizer\.lr must be positive, but it is -1e-05: 1e-6 to",
        nemorl.OptimizerConfig,
        lr=-1e-5,
    ),
    "minimum of the schedule above 1": setting(
        r"optimizer\.min_lr_ratio must lie in 0 … 1, but it is 2: 0\.1",
        nemorl.OptimizerConfig,
        min_lr_ratio=2,
    ),
    "epsilon 0": setting(
        r"optimizer\.eps must be positive, but it is 0: 1e-8", nemorl.OptimizerConfig, eps=0
    ),
    "decay of 1": setting(
        r"optimizer\.beta2 must lie in 0 … 1 \(1 excluded\), but it is 1: 0\.9",
        nemorl.OptimizerConfig,
        beta2=1,
    ),
    "clipping at 0": setting(
        r"optimizer\.max_grad_norm must be positive or None, but it is 0: 1\.0",
        nemorl.OptimizerConfig,
        max_grad_norm=0,
    ),
    "negative warm-up": setting(
        r"optimizer\.warmup_steps must be at least 0, but it is -1: use 0",
        nemorl.OptimizerConfig,
        warmup_steps=-1,
    ),
    "no rows in a microbatch": setting(
        r"trainer\.train_micro_batch_size must be at least 1, but it is 0: use 1",
        nemorl.TrainerConfig,
        train_micro_batch_size=0,
    ),
    "two sizes of a microbatch": setting(
        r"trainer\.micro_batch_tokens can't be given together with trainer\.train_micro_batch_size,"
        r" but it is 64: keep one",
        nemorl.TrainerConfig,
        train_micro_batch_size=4,
        micro_batch_tokens=64,
    ),
    "packed rows without packing": setting(
        r"trainer\.packed_row_tokens needs trainer\.sequence_packing, but it is 64: add --trainer",
        nemorl.TrainerConfig,
        packed_row_tokens=64,
    ),
    "a sequence of one token": setting(
        r"data\.max_total_sequence_length must be at least 2, but it is 1: use 2",
        nemorl.DataConfig,
        max_total_sequence_length=1,
    ),
    "responses of no tokens": setting(
        r"generation\.max_new_tokens must be at least 1, but it is 0: use 1",
        nemorl.GenerationConfig,
        max_new_tokens=0,
    ),
    "replicas of the embedded engine": setting(
        r"generation\.num_replicas is not for torch, .*but it is 2: add --generation\.backend vllm",
        nemorl.GenerationConfig,
        num_replicas=2,
    ),
    "engine arguments for the embedded engine": setting(
        r"generation\.engine is not for torch",
        nemorl.GenerationConfig,
        engine={"gpu_memory_utilization": 0.5},
    ),
    "no replicas": setting(
        r"generation\.num_replicas must be at least 1, but it is 0: use 1",
        nemorl.GenerationConfig,
        backend="vllm",
        num_replicas=0,
    ),
    "an engine on no device": setting(
        r"generation\.tensor_parallel_size must be at least 1",
        nemorl.GenerationConfig,
        backend="vllm",
        tensor_parallel_size=0,
    ),
    "no time at all": setting(
        r"generation\.timeout_s must be at least 1, but it is 0",
        nemorl.GenerationConfig,
        backend="vllm",
        timeout_s=0.0,
    ),
    "negative temperature": setting(
        r"temperature must be .*but it is -1", nemorl.GenerationConfig, temperature=-1.0
    ),
    "top_p of 0": setting(r"top_p must .*but it is 0", nemorl.GenerationConfig, top_p=0.0),
    "an empty stop string": setting(
        r"stop_strings must not hold an empty string.*remove it",
        nemorl.GenerationConfig,
        stop_strings=("",),
    ),
    "no checkpoints kept": setting(
        r"run\.keep_checkpoints must be at least 1, but it is 0: use 1",
        nemorl.RunConfig,
        keep_checkpoints=0,
    ),
    "negative seed": setting(
        r"run\.seed must be at least 0, but it is -1: use 0", nemorl.RunConfig, seed=-1
    ),
    "resume without a folder": setting(
        r"run\.dir must be given to resume a run, but it is None: name",
        nemorl.RunConfig,
        resume=True,
    ),
    "a condition that is none": setting(
        r"run\.stop_when must be a metric, one of >= <= > <, and a number, but it is 'accuracy ="
        r" 1': write it like",
        nemorl.RunConfig,
        stop_when="accuracy = 1",
    ),
    "a direction without a metric": setting(
        r"run\.higher_is_better needs run\.metric, but it is True: name its metric",
        nemorl.RunConfig,
        higher_is_better=True,
    ),
    "dual clip below 1": setting(
        r"loss\.dual_clip must be above 1 or None, but it is 0\.5: 3 is usual",
        nemorl.ClippedLoss,
        dual_clip=0.5,
    ),
    "clip range above 1": setting(
        r"loss\.clip_low must lie in 0 … 1, but it is 1\.5: 0\.2", nemorl.ClippedLoss, clip_low=1.5
    ),
    "negative KL": setting(
        r"kl\.coef must be at least 0, but it is -0\.1: use 0", nemorl.KLConfig, coef=-0.1
    ),
    "bounds the wrong way round": setting(
        r"off_policy\.min must be at least 0 and below off_policy\.max, but it is"
        r" 3.*off_policy\.max is 2",
        nemorl.OffPolicyConfig,
        min=3.0,
        max=2.0,
    ),
    "overlong buffer in tokens": setting(
        r"overlong\.buffer must lie in 0 … 1, but it is 512: DAPO's is 0\.2",
        nemorl.OverlongConfig,
        buffer=512,
    ),
    "a group of one": grpo_setting(
        r"num_generations_per_prompt must be at least 2 .*but it is 1: use 2 or more",
        num_generations_per_prompt=1,
    ),
    "a batch that doesn't divide": grpo_setting(
        r"train_global_batch_size must divide the 24 responses of a rollout batch \(.*\), but it is"
        r" 7: all optimizer steps are of one size",
        train_global_batch_size=7,
    ),
    "greedy training": grpo_setting(
        r"generation\.temperature must be above 0 for training, but it is 0\.0: 1\.0 is usual",
        generation={"temperature": 0.0},
    ),
    "no room for the prompt": Case(
        lambda place: nemorl.run(place.grpo(generation={"max_new_tokens": 32})),
        r"generation\.max_new_tokens must be below data\.max_total_sequence_length, but it is 32:"
        r" .*leave room",
    ),
    "a microbatch too small for a sequence": grpo_setting(
        r"trainer\.micro_batch_tokens must hold the longest sequence, but it is 16:"
        r" data\.max_total_sequence_length is 32",
        trainer={"micro_batch_tokens": 16},
    ),
    "no steps": grpo_setting(
        r"max_num_steps must be at least 1, but it is 0: use 1", max_num_steps=0
    ),
    "a degree of no devices": setting(
        r"parallel\.tp must be at least 1, but it is 0: use 1", nemorl.ParallelPlan, tp=0
    ),
    "no shards": setting(
        r"parallel\.dp_shard must be at least 1, but it is 0: use 1",
        nemorl.ParallelPlan,
        dp_shard=0,
    ),
    "steps of a profile that are none": setting(
        r"profile\.steps must be FIRST:LAST, counted from 1, but it is '0:3': 10:12 records three"
        r" steps",
        nemorl.ProfileConfig,
        steps="0:3",
    ),
    "a profile without its last step": setting(
        r"profile\.steps must be FIRST:LAST.*but it is '5:'", nemorl.ProfileConfig, steps="5:"
    ),
    "a profile that ends before it begins": setting(
        r"profile\.steps must be FIRST:LAST.*but it is '5:3'", nemorl.ProfileConfig, steps="5:3"
    ),
    "steps of a profile in strange digits": setting(
        r"profile\.steps must be FIRST:LAST.*but it is '²'", nemorl.ProfileConfig, steps="²"
    ),
    "a folder for no profile": setting(
        r"profile\.dir needs profile\.steps, but it is 'traces': name the steps to record",
        nemorl.ProfileConfig,
        dir="traces",
    ),
    "fewer than no restarts": setting(
        r"runtime\.max_restarts must be at least 0, but it is -1: use 0",
        nemorl.RuntimeConfig,
        max_restarts=-1,
    ),
    "ranks without a core": setting(
        r"runtime\.cpus_per_rank must be at least 1, but it is 0: use 1",
        nemorl.RuntimeConfig,
        cpus_per_rank=0,
    ),
    "no time for a step": setting(
        r"runtime\.timeout_s must be at least 1, but it is 0\.0: use 1 or more",
        nemorl.RuntimeConfig,
        timeout_s=0.0,
    ),
    "more time than clocks have": setting(
        r"runtime\.timeout_s must be at most 604800, a week, but it is inf: 86400 is a day",
        nemorl.RuntimeConfig,
        timeout_s=float("inf"),
    ),
    "no time to start": setting(
        r"runtime\.start_timeout_s must be at least 1, but it is -1\.0",
        nemorl.RuntimeConfig,
        start_timeout_s=-1.0,
    ),
    "unknown setting of train": Case(
        lambda place: nemorl.train(model=place.model, dataset=place.rows, learning_rat=1e-5),
        r"unknown setting learning_rat.*did you mean",
    ),
    "unknown algorithm": Case(
        lambda place: nemorl.train(model=place.model, dataset=place.rows, algorithm="gpro"),
        r"unknown algorithm 'gpro'; did you mean grpo\? Valid",
    ),
}


# ---- Settings of several devices, against the model and each other: before a process is started


def devices(message: str, **options: Any) -> Case:
    return Case(lambda place: nemorl.run(place.sft(**options)), message)


DEVICES = {
    "heads that don't divide": devices(
        r"parallel must suit the model, but parallel\.tp 3 does not divide the model's"
        r" num_attention_heads 4; .*parallel.tp may be",
        parallel={"tp": 3},
    ),
    "adapters that are split": devices(
        r"lora\.rank must be 0 with parallel\.tp above 1, but it is 4: spread",
        parallel={"tp": 2},
        lora=nemorl.LoRAConfig(rank=4),
    ),
    "one GPU for two": devices(
        r"trainer\.device must be cpu .*where the ranks have one each, but it is 'cuda:1'",
        parallel={"dp_shard": 2},
        trainer={"device": "cuda:1"},
    ),
    "a model in memory for two": Case(
        lambda place: nemorl.run(
            place.sft(parallel={"dp_shard": 2}), model=tiny_model(), tokenizer=tiny_tokenizer()
        ),
        r"model must be a folder or a hub name, .*, but it is 'Qwen2ForCausalLM': save_pretrained",
    ),
    "norms split between no ranks": devices(
        r"parallel\.sequence_parallel is for parallel\.tp above 1, but it is False: remove it",
        parallel={"sequence_parallel": False},
    ),
    "restarts of no ranks": devices(
        r"runtime\.max_restarts is for several ranks, but it is 2: add a degree of parallel",
        runtime={"max_restarts": 2},
    ),
    "a profile of steps that never come": devices(
        r"profile\.steps must begin within the 1 optimizer steps of the run, but it is '2:3': name"
        r" earlier steps",
        profile={"steps": "2:3"},
    ),
    "traces into a file": Case(
        lambda place: nemorl.run(
            place.sft(profile={"steps": "1", "dir": place.write("file", "") + "/traces"})
        ),
        r"profile\.dir must be a folder that can be written to, but .*file/traces can't .*name"
        r" another",
    ),
}


# ---- Settings in a file


def yaml(message: str, text: str) -> Case:
    return Case(
        lambda place: nemorl.load_config(nemorl.GRPOConfig, place.write("settings.yaml", text)),
        message,
    )


YAML = {
    "unknown key": yaml(
        r"settings\.yaml, line 2: unknown key kl\.coeff; did you mean kl\.coef\? keys of kl: coef,",
        "kl:\n  coeff: 0.1\n",
    ),
    "key of another section": yaml(
        r"settings\.yaml, line 1: unknown key lr; did you mean optimizer\.lr\?", "lr: 0.1\n"
    ),
    "key of another variant": yaml(
        r"line 3: unknown key loss\.clip_low.*keys of loss reinforce",
        "loss:\n  name: reinforce\n  clip_low: 0.1\n",
    ),
    "unknown variant": yaml(
        r"line 2: loss\.name must be one of clipped, .*but it is 'gsop'; did you mean gspo\?",
        "loss:\n  name: gsop\n",
    ),
    "text for a number": yaml(
        r"line 2: optimizer\.lr must be a valid number, but it is 'fast'",
        "optimizer:\n  lr: fast\n",
    ),
    "a number in quotes": yaml(
        r"line 2: optimizer\.lr must be a valid number, but it is '1e-5': give it without quotes",
        'optimizer:\n  lr: "1e-5"\n',
    ),
    "half a step": yaml(
        r"line 1: max_num_steps must be a valid integer, but it is 1\.5", "max_num_steps: 1.5\n"
    ),
    "None for null": yaml(
        r"line 2: optimizer\.max_grad_norm must be a valid number, but it is 'None': write null",
        "optimizer:\n  max_grad_norm: None\n",
    ),
    "one for a list": yaml(
        r"line 2: generation\.stop_strings must be a list.*write \[",
        "generation:\n  stop_strings: 5\n",
    ),
    "a value for a section": yaml(
        r"optimizer must be a section, but it is 1e-05: write its keys below it",
        "optimizer: 1e-5\n",
    ),
    "a key twice": yaml(
        r'line 3: .*duplicate key "max_num_steps".*: keep one',
        "max_num_steps: 1\nkl:\nmax_num_steps: 2\n",
    ),
    "a setting under two names": yaml(
        r"learning_rate.* and optimizer\.lr are the same setting: keep one",
        "learning_rate: 1\noptimizer:\n  lr: 1\n",
    ),
    "no YAML": yaml(r"settings\.yaml, line \d: not valid YAML:", "optimizer: {lr: 1\n"),
    "a list": yaml(r"settings\.yaml must hold keys and sections", "- 1\n"),
    "a wrong value in a file": yaml(
        r"optimizer\.lr must be positive, but it is -1\.0", "optimizer:\n  lr: -1\n"
    ),
    "a span without quotes": yaml(
        r"line 2: profile\.steps must be a valid string, but it is 10: write \"10\", with quotes",
        "profile:\n  steps: 10\n",
    ),
    "unknown way to cut rows": yaml(
        r"line 2: parallel\.cp_method must be one of ulysses, allgather, but it is 'ulyses'; did"
        r" you mean ulysses\?",
        "parallel:\n  cp_method: ulyses\n",
    ),
    "half precision": yaml(
        r"line 2: parallel\.param_dtype must be one of float32, bfloat16, but it is 'float16'",
        "parallel:\n  param_dtype: float16\n",
    ),
    "checkpointing that is true": yaml(
        r"line 2: parallel\.activation_checkpointing must be one of none, selective, full, but it"
        r" is True",
        "parallel:\n  activation_checkpointing: true\n",
    ),
    "no such file": Case(
        lambda place: nemorl.load_config(nemorl.SFTConfig, "no.yaml"),
        r"can't read the config file no\.yaml: No such file",
    ),
}


# ---- The command line


def flags(message: str, *arguments: str) -> Case:
    return Case(
        lambda place: command(*[argument.format(place=place) for argument in arguments]),
        message,
        Refused,
    )


def command_with_rows(place: Place) -> None:
    """A command that fails when it has begun with the run's folder: the terminal shows a line, the
    log where the error came from.
    """
    rows = place.write("rows.jsonl", '{"prompt": "1+1="}\n')
    try:
        command(
            "sft",
            "--model.path",
            place.model,
            "--data.train",
            rows,
            "--run.dir",
            str(place.run_folder),
            "--trainer.device",
            "cpu",
        )
    finally:
        assert "Traceback" in (place.run_folder / "log.jsonl").read_text()


FLAGS = {
    "rows without a response": Case(
        command_with_rows,
        r"nemorl sft: error: .*rows\.jsonl, line 1: response must be text or messages, got None"
        r" .*data\.response_column",
        Refused,
    ),
    "report of no run": flags(
        r"run\.dir must be the folder of a run, but no/run holds no config\.yaml.*check the path",
        "report",
        "no/run",
    ),
    "plan for no GPU": flags(
        r"gpus must be at least 1, but it is 0", "plan", "--model", "{place.model}", "--gpus", "0"
    ),
    "plan that does not divide": flags(
        r"tp must divide the 4 GPUs, but it is 3: change it or gpus",
        "plan",
        "--model",
        "{place.model}",
        "--gpus",
        "4",
        "--tp",
        "3",
    ),
    "plan without memory": flags(
        r"gpu_memory must hold a plan, but it is 0\.0001.*the smallest needs .* GB",
        "plan",
        "--model",
        "{place.model}",
        "--gpus",
        "2",
        "--gpu-memory",
        "0.0001",
    ),
    "translation of no file": Case(
        lambda place: translate("no.yaml"), r"can't read the config file no\.yaml: No such file"
    ),
    "inspection of nothing": flags(
        r"data\.train must be given, but it is None: add --data\.train FILE", "data", "inspect"
    ),
    "unknown preference loss": flags(
        r"loss\.name must be one of dpo, .*but it is 'dpoo'; did you mean dpo\?",
        "dpo",
        "--loss",
        "dpoo",
    ),
    "unknown command": flags(r"unknown command 'gpro'; did you mean grpo\? Commands: ", "gpro"),
    "unknown flag": flags(r"num-prompts-per-step", "grpo", "--num-prompts-per-stp", "3"),
    "flag without a number": flags(r"optimizer\.lr", "grpo", "--optimizer.lr", "fast"),
    "flag of another variant": flags(
        r"--loss\.clip-low is no setting of loss reinforce: .*belongs to clipped.*add --loss"
        r" clipped",
        "grpo",
        "--loss",
        "reinforce",
        "--loss.clip-low",
        "0.1",
    ),
    "no model": flags(
        r"model\.path must be given, but it is '': add --model\.path with a folder",
        "grpo",
        "--data.train",
        "{place.rows}",
    ),
    "no data": flags(
        r"data\.train must name rows to train on: add --data\.train FILE",
        "grpo",
        "--model.path",
        "{place.model}",
    ),
    "unknown preset": flags(r"preset.*dapo", "grpo", "--preset", "dappo"),
    "config that isn't there": flags(
        r"can't read the config file no\.yaml: No such file", "sft", "--config", "no.yaml"
    ),
    "resume of nothing named": flags(
        r"run\.dir must be given to resume a run",
        "sft",
        "--model.path",
        "m",
        "--data.train",
        "d",
        "--run.resume",
    ),
    "several greedy answers": flags(
        r"n must be 1 with temperature 0.*add --temperature 1\.0",
        "eval",
        "--model",
        "m",
        "--data",
        "d",
        "-n",
        "2",
    ),
    "a device for vLLM": flags(
        r"device is not for vllm.*but it is 'cuda:1': remove it, .*CUDA_VISIBLE_DEVICES",
        *("generate", "--model", "m", "--prompt", "p", "--backend", "vllm", "--device", "cuda:1"),
    ),
    "no prompt": flags(
        r"prompt must be given, but it is \(\): add --prompt", "generate", "--model", "m"
    ),
    "template without chat": flags(
        r"chat_template is for --chat",
        "generate",
        "--model",
        "m",
        "--prompt",
        "p",
        "--chat-template",
        "t",
    ),
    "file of prompts that isn't there": flags(
        r"file must be a readable text file, but no\.txt is not.*give one prompt",
        "generate",
        "--model",
        "m",
        "--file",
        "no.txt",
    ),
    "export of no run": flags(
        r"run\.dir must be the folder of a run, but no/run holds no config\.yaml.*check the path",
        "export",
        "--run",
        "no/run",
        "--output",
        "x",
    ),
    "eval of no file": flags(
        r"no file 'no\.jsonl': check the path",
        "eval",
        "--model",
        "{place.model}",
        "--data",
        "no.jsonl",
    ),
    "generate without such a model": flags(
        r"there is no folder no/such/model\): check the path",
        "generate",
        "--model",
        "no/such/model",
        "--prompt",
        "1",
    ),
}


# ---- Data


def file_of_rows(
    message: str, name: str, content: str | bytes, make: Callable[..., Any] = Place.sft, **data: Any
) -> Case:
    def provoke(place: Place) -> None:
        nemorl.run(make(place, data={"train": place.write(name, content), **data}))

    return Case(provoke, message)


def rows(message: str, given: Any, make: Callable[..., Any] = Place.sft, **data: Any) -> Case:
    return Case(
        lambda place: nemorl.run(make(place, data={"train": None, **data}), train=given), message
    )


def validation(
    message: str, given: Any, make: Callable[..., Any] = Place.sft, **options: Any
) -> Case:
    return Case(lambda place: nemorl.run(make(place, **options), validation=given), message)


LINE = '{"prompt": "1+1=", "response": "2", "answer": "2"}\n'
ROW = {"prompt": "1+1=", "response": "2", "answer": "2"}


def preference(message: str, row: dict[str, Any], **options: Any) -> Case:
    return Case(lambda place: nemorl.run(place.config(dpo_config, **options), train=[row]), message)


def conversation(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant"), contents, strict=False)
    ]


PREFERENCES = {
    "a preference without its worse side": preference(
        r"row 1: a preference must have chosen and rejected, .*got columns prompt, chosen; name"
        r" them with .*data\.rejected_column",
        {"prompt": "1", "chosen": "2"},
    ),
    "completions of one rank": preference(
        r"row 1: completions must have two of unlike rank, got ranks \[0, 0\]: leave the row out",
        {
            "context": "1",
            "completions": [{"rank": 0, "completion": "1"}, {"rank": 0, "completion": "2"}],
        },
    ),
    "completions without ranks": preference(
        r"row 1: completions must be a list of .*got \['1', '2'\]",
        {"context": "1", "completions": ["1", "2"]},
    ),
    "preferences of different prompts": preference(
        r"row 1: chosen and rejected must begin with the same prompt",
        {"chosen": conversation("1", "2"), "rejected": conversation("3", "4")},
    ),
    "a label that is none": preference(
        r"row 1: label must be true or false, got 'maybe' \(data\.label_column",
        {"prompt": "1", "response": "2", "label": "maybe"},
        loss=nemorl.KTOLoss(),
    ),
}
DATA = PREFERENCES | {
    "no such file of rows": Case(
        lambda place: nemorl.run(place.sft(data={"train": "no/rows.jsonl"})),
        r"no file 'no/rows\.jsonl': check the path",
    ),
    "a line that is no JSON": file_of_rows(
        r"rows\.jsonl, line 2: not JSON .*column", "rows.jsonl", LINE + '{"prompt": "1+1=",\n'
    ),
    "a line that is no object": file_of_rows(
        r"rows\.jsonl, line 2: a row must be a dict .*got \[1\]",
        "rows.jsonl",
        LINE + "[1]\n",
    ),
    "an empty object": file_of_rows(
        r"rows\.jsonl, line 2: a row must be a dict with at least one column, got \{\}",
        "rows.jsonl",
        LINE + "{}\n",
    ),
    "an empty file": file_of_rows(r"rows\.jsonl' holds no rows", "rows.jsonl", ""),
    "no UTF-8": file_of_rows(
        r"rows\.jsonl: not UTF-8 text .*convert the file", "rows.jsonl", b'{"prompt": "\xff"}\n'
    ),
    "one object in a .json file": file_of_rows(
        r"rows\.json, line 1: a \.json file must hold a list of objects", "rows.json", LINE
    ),
    "lines in a .json file": file_of_rows(
        r"rows\.json, line 2: not JSON .*name it \.jsonl", "rows.json", LINE + LINE
    ),
    "a ragged table": file_of_rows(
        r"rows\.csv, line 3: the header has 2 columns, this row has 3",
        "rows.csv",
        "prompt,response\n1,2\n1,2,3\n",
    ),
    "no Parquet": file_of_rows(
        r"rows\.parquet: not a Parquet file that can be read", "rows.parquet", "PAR1"
    ),
    "no rows": rows(r"data\.train must name rows to train on|holds no rows", []),
    "no source at all": rows(
        r"data\.train must name rows to train on: add --data\.train FILE", None
    ),
    "a list of something else": rows(
        r"row 1: a row must be a dict with at least one column, got 3", [3, "text"]
    ),
    "a wrong column": rows(
        r"data\.prompt_column.* is 'promt', but row 1 has the columns .*did you mean prompt\?",
        [ROW],
        prompt_column="promt",
    ),
    "a column that only some rows have": rows(
        r"data\.answer_column.* is 'solution', but row 2 has",
        [{**ROW, "solution": 1}, ROW],
        answer_column="solution",
    ),
    "no prompt in a row": rows(
        r"row 2: a row needs a prompt .*got columns response; name its column with prompt_column",
        [ROW, {"response": "2"}],
    ),
    "no response in a row": rows(
        r"row 1: response must be text or messages, got None .*name its column with"
        r" response_column",
        [{"prompt": "1"}],
    ),
    "an empty response": rows(r"row 2: .*response", [ROW, {"prompt": "1+1=", "response": []}]),
    "a number for a response": rows(
        r"row 1: response must be text or messages, got 2", [{"prompt": "1", "response": 2}]
    ),
    "an empty prompt": rows(
        r"row 1: prompt must have at least one token, got '': leave the row out",
        [{**ROW, "prompt": ""}],
        Place.grpo,
    ),
    "a message without a role": rows(
        r'row 1: messages must be a list of messages like \{"role": "user"',
        [{"messages": [{"content": "hi"}]}],
    ),
    "no messages": rows(r"row 1: messages must be a list of messages", [{"messages": []}]),
    "nothing that the assistant says": rows(
        r"row 1: .*assistant", [{"messages": [{"role": "user", "content": "hi"}]}]
    ),
    "a row too long for SFT": rows(
        r"row 2: .*tokens.*max.*32", [ROW, {"prompt": "1" * 40, "response": "2"}]
    ),
    "a prompt too long for its response": rows(
        r"row 2: .*28", [ROW, {**ROW, "prompt": "1" * 30}], Place.grpo
    ),
    "all rows dropped": rows(
        r"data\.max_total_sequence_length must leave a row to use, but all 1 examples are longer"
        r" \(up to 42 tokens\): raise it",
        [{"prompt": "1" * 40, "response": "2"}],
        too_long="drop",
    ),
    "a split of a file": file_of_rows(
        r'has no splits, so split must be "train", got \'test\': name the file',
        "rows.jsonl",
        LINE,
        split="test",
    ),
    "a share of rows below 0": Case(
        lambda place: nemorl.DataConfig(held_out=-0.5),
        r"data\.held_out must be at least 0, but it is -0\.5: use 0",
    ),
    "all rows held out": Case(
        lambda place: nemorl.run(place.sft(data={"held_out": 40})),
        r"data\.held_out.* must leave at least one of the 40 rows on each side, got 40",
    ),
    "rows held out and given": validation(
        r"data\.held_out is for runs without rows to validate on, but it is 4: omit it",
        [ROW],
        data={"held_out": 4},
    ),
    "weights of other sets": Case(
        lambda place: nemorl.run(place.sft(data={"weights": (1.0, 2.0)})),
        r"data\.weights must be as many as there are training sets \(1\), but it is \(1\.0, 2\.0\)",
    ),
    "a negative weight": Case(
        lambda place: nemorl.run(place.sft(data={"weights": (-1.0,)})),
        r"data\.weights\) must be positive, got \(-1\.0,\): leave set 1 out of data\.train",
    ),
    "tools that are no JSON": rows(
        r"row 1: tools must be a list of tools, or one as JSON text, got '\{'",
        [{"messages": conversation("1", "2"), "tools": "{"}],
    ),
    "validation on a set that isn't there": Case(
        lambda place: nemorl.run(place.sft(data={"validation": "no.jsonl"})),
        r"no file 'no\.jsonl': check the path",
    ),
    "validation rows without what they need": validation(
        r"data\.validation must have rows with a response.*but row 1 has the columns prompt: name"
        r" them",
        [{"prompt": "1+1="}],
    ),
    "questions that leave no room for an answer": validation(
        r"generation\.max_new_tokens must be below data\.max_total_sequence_length, but it is 256",
        [ROW],
        generation={"max_new_tokens": 256},
    ),
}


# ---- Tokenizer and model


def tokenizer_with(**changes: Any) -> Any:
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


CHAT = [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}]


def model_folder(place: Place, **changes: Any) -> Path:
    folder = place.folder / "model"
    shutil.copytree(place.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def spoil(path: Path, change: Callable[[Path], Any]) -> Path:
    change(path)
    return path


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def with_nan(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})


def run_with_model(
    make: Callable[..., Any], change: Callable[[Place], Path]
) -> Callable[[Place], Any]:
    return lambda place: nemorl.run(
        make(place, model=nemorl.ModelConfig(path=str(change(place)), tokenizer=place.model))
    )


MODELS = {
    "no chat template": Case(
        lambda place: nemorl.run(place.sft(), train=CHAT),
        r"row 1: messages need a chat template.*pass chat_template \(--model\.chat-template\)",
    ),
    "a template that is no Jinja": Case(
        lambda place: nemorl.run(place.sft(model={"chat_template": "{% for %}"}), train=CHAT),
        r"model\.chat_template must be a Jinja template, but its line 1",
    ),
    "a template that refuses the messages": Case(
        lambda place: nemorl.run(
            place.sft(model={"chat_template": "{{ raise_exception('no system') }}"}), train=CHAT
        ),
        r"row 1: the chat template refuses.*no system",
    ),
    "a template file that isn't there": Case(
        lambda place: nemorl.run(place.sft(model={"chat_template": "no/template.jinja"})),
        r"model\.chat_template must be a Jinja template, a file .*'no/template\.jinja' can't be"
        r" read",
    ),
    "a tokenizer without an end": Case(
        lambda place: nemorl.run(place.sft(), tokenizer=tokenizer_with(eos_token=None)),
        r"eos|end-of-sequence",
    ),
    "a tokenizer with more tokens than the model": Case(
        lambda place: nemorl.run(place.sft(), model=tiny_model(vocab_size=8)),
        r"model\.tokenizer must be made for the model, which has embeddings for the tokens 0 … 7,"
        r" but one of its tokens is 41: name",
    ),
    "no such tokenizer": Case(
        lambda place: nemorl.run(place.sft(model={"tokenizer": "no/tokenizer"})),
        r"model\.tokenizer must be .* but 'no/tokenizer' could not be loaded",
    ),
    "no model named": Case(
        lambda place: nemorl.run(place.sft(model={"path": ""})),
        r"model\.path must name a model folder.*give --model\.path",
    ),
    "a model folder that isn't there": Case(
        lambda place: nemorl.run(place.sft(model={"path": "no/such/model"})),
        r"there is no folder no/such/model\): check the path",
    ),
    "a folder without a model": Case(
        run_with_model(Place.sft, lambda place: place.folder),
        r"model\.path must be a folder with a Hugging Face model or a hub name, but '.*' could not"
        r" be loaded",
    ),
    "a model of another kind": Case(
        run_with_model(
            Place.sft,
            lambda place: model_folder(
                place,
                sliding_window=16,
                use_sliding_window=True,
                layer_types=["sliding_attention"] * 2,
            ),
        ),
        r"the model must be one of .*sliding",
    ),
    "a damaged model file": Case(
        run_with_model(
            Place.sft, lambda place: spoil(model_folder(place) / "model.safetensors", half).parent
        ),
        r"model\.path.*could not be loaded",
    ),
    "a model file that lacks a layer": Case(
        run_with_model(
            Place.sft,
            lambda place: spoil(model_folder(place) / "model.safetensors", without_a_tensor).parent,
        ),
        r"model\.path must be .*could not be loaded \(its weights lack model\.layers.*, 1 in all\):"
        r" check it",
    ),
    "weights that are NaN": Case(
        run_with_model(
            Place.sft,
            lambda place: spoil(model_folder(place) / "model.safetensors", with_nan).parent,
        ),
        r"the loss of optimizer step 1 must be finite, but it is nan: the weights were left as"
        r" they are",
        FloatingPointError,
    ),
    "weights that are NaN, sampled from": Case(
        run_with_model(
            Place.grpo,
            lambda place: spoil(model_folder(place) / "model.safetensors", with_nan).parent,
        ),
        r"logits.*not finite.*weights",
        FloatingPointError,
    ),
    "template arguments without a template": Case(
        lambda place: nemorl.run(place.sft(model={"chat_template_kwargs": {"thinking": False}})),
        r"chat_template_kwargs are for a chat template, but the tokenizer has none, got .*add"
        r" model\.chat_template",
    ),
    "template arguments that it doesn't ask for": Case(
        lambda place: nemorl.run(
            place.sft(
                model={
                    "chat_template": "{{ messages }}",
                    "chat_template_kwargs": {"thinking": False},
                }
            )
        ),
        r"model\.chat_template_kwargs has 'thinking', but the chat template doesn't ask for it",
    ),
    "adapters on layers that aren't there": Case(
        lambda place: nemorl.run(place.sft(lora={"rank": 2, "target_modules": ("q_prj",)})),
        r"lora\.target_modules must name linear layers .*but it is 'q_prj': there are down_proj",
    ),
    "a loaded model without a tokenizer": Case(
        lambda place: nemorl.train(model=tiny_model(), dataset=place.rows, reward_fn="exact_match"),
        r"tokenizer must be given with a loaded model .*pass tokenizer=",
    ),
    "an engine without room for the longest sequence": Case(
        lambda place: nemorl.run(place.grpo(generation={"backend": "vllm", "max_model_len": 16})),
        r"generation\.max_model_len must be at least data\.max_total_sequence_length \(32\), but it"
        r" is 16: lower that one",
    ),
    "a device that isn't there": Case(
        lambda place: nemorl.run(place.sft(trainer={"device": "cuda:99"})),
        r"trainer\.device must be one that torch can use here, but it is 'cuda:99' .*: omit it",
    ),
    "unknown training backend": Case(
        lambda place: nemorl.run(place.sft(trainer={"backend": "dtenser"})),
        r"unknown training backend 'dtenser'; did you mean dtensor\? Valid names",
    ),
    "unknown generation backend": Case(
        lambda place: nemorl.run(place.grpo(generation={"backend": "vlmm"})),
        r"unknown generation backend 'vlmm'.*Valid names",
    ),
}


# ---- Rewards


def reward(
    message: str, given: Any, error: type[BaseException] = ValueError, **options: Any
) -> Case:
    return Case(lambda place: nemorl.run(place.grpo(**options), reward=given), message, error)


def wrong_key(prompt: str, response: str) -> float:
    return {"1": 1.0}["2"]


REWARDS = {
    "unknown reward": reward(
        r"reward must be one of .*, or module:function, but it is 'exact_mach'; did you mean"
        r" exact_match\?",
        "exact_mach",
    ),
    "no such module": reward(
        r"reward must be importable as module:function, but there is no module 'no_module'",
        "no_module:fn",
    ),
    "no such function": reward(
        r"reward must be importable .*has no 'no_function'", "tests.tiny_models:no_function"
    ),
    "no function": Case(
        lambda place: read_signature(3),
        r"reward must be a function fn\(prompt, response\), but it is 3: pass the function itself",
    ),
    "a class": reward(
        r"reward must be a function or an environment, but it is the class Path: give Path",
        Path,
    ),
    "no parameters": reward(
        r"reward 'lambda' must take at least \(prompt, response\), but its parameters are \[\]: add"
        r" them",
        lambda: 0.0,
    ),
    "a column that isn't there": reward(
        r"wants the column 'level', but .*line 1 has only \['answer', 'prompt', 'response'\]:"
        r" add it",
        lambda prompt, response, level: 0.0,
    ),
    "a reward that raises": reward(
        r"This was reward 'wrong_key' for prompt '\d\+\d=' and response", wrong_key, KeyError
    ),
    "a reward of NaN": reward(
        r"must be a finite number, but it is nan for prompt '\d\+\d=' and response .*return 0\.0",
        lambda prompt, response: float("nan"),
    ),
    "a reward of None": reward(
        r"must be a finite number, but it is None for prompt '\d\+\d='",
        lambda prompt, response: None,
    ),
    "a reward of text": reward(
        r"must be a finite number, but it is 'good' for prompt", lambda prompt, response: "good"
    ),
    "too few rewards": reward(
        r"must return one number per response, but it returned 1 for a batch of 24"
        r" responses.*return as many",
        lambda prompts, responses: [1.0],
    ),
    "one number for a batch": reward(
        r"must return a list with one number per response, but it returned 1\.0",
        lambda prompts, responses: 1.0,
    ),
    "an async reward": Case(
        lambda place: nemorl.run(place.grpo(), reward=_async_reward),
        r"must be a plain function, but it is async: write fn",
    ),
    "weights for other rewards": reward(
        r"reward_weights must be one number per reward, but there are 3 for .*: give 2",
        ["exact_match", "contains_answer"],
        reward_weights=(1.0, 2.0, 3.0),
    ),
    "weights that are all 0": reward(
        r"reward_weights must be finite numbers that are not all 0",
        ["exact_match", "contains_answer"],
        reward_weights=(0.0, 0.0),
    ),
    "a reward for what learns from none": Case(
        lambda place: nemorl.train(
            model=tiny_model(),
            tokenizer=tiny_tokenizer(),
            dataset=place.rows,
            algorithm="dpo",
            reward_fn="exact_match",
        ),
        r"reward can't be given here, because DPOConfig has none, but it is .*: remove it",
    ),
}


async def _async_reward(prompt: str, response: str) -> float:
    return 0.0


# ---- The run's directory, checkpoints, export


def with_run(
    message: str, provoke: Callable[[Place, Path], Any], error: type[BaseException] = ValueError
) -> Case:
    """A finished run is in the run's folder, and must be as it was afterwards."""
    return Case(lambda place: provoke(place, place.finished_run()), message, error)


def damage(run: Path, file: str, change: Callable[[Path], Any]) -> None:
    spoil(run / "checkpoints" / "step_1" / file, change)


def in_use(place: Place) -> None:
    with locked(place.run_folder):
        nemorl.run(place.sft())


NONE_WHOLE = (
    r"run\.resume needs a whole checkpoint, but none in .* is: put one back, or begin anew in"
    r" another folder"
)


def resume_damaged(file: str, change: Callable[[Path], Any]) -> Callable[[Place, Path], Any]:
    def provoke(place: Place, run: Path) -> None:
        damage(run, file, change)
        nemorl.run(place.resumed())

    return provoke


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


RUNS = {
    "unknown logger": Case(
        lambda place: nemorl.run(place.sft(run={"loggers": ("wandbb",)})),
        r"unknown logger 'wandbb'; did you mean wandb\? Valid names",
    ),
    "a reward that raises in the second step": Case(
        lambda place: nemorl.run(place.grpo(max_num_steps=2), reward=FailsOnce(24 + 5)),
        r"the judge is out",
        RuntimeError,
        saved=1,
    ),
    "a folder with a run": with_run(
        r"run\.dir must be a folder without a run, but .* already holds one: go on with it"
        r" \(--run\.resume\)",
        lambda place, run: nemorl.run(place.sft()),
    ),
    "a file for a folder": Case(
        lambda place: nemorl.run(place.sft(run={"dir": place.write("file", "")})),
        r"run\.dir must be a folder that can be written to, but .*file can't.*name another",
    ),
    "a folder below a file": Case(
        lambda place: nemorl.run(place.sft(run={"dir": place.write("file", "") + "/run"})),
        r"run\.dir must be a folder that can be written to, but .*name another",
    ),
    "a folder that is in use": Case(
        in_use,
        r"run\.dir must be used by one run at a time, but .* is in use by process \d+ on .*: wait"
        r" for it or name another",
    ),
    "resumed by another algorithm": with_run(
        r"must be resumed by its own algorithm, but .* is of sft, not grpo: name another run\.dir",
        lambda place, run: nemorl.run(place.grpo(run={"resume": True})),
    ),
    "resumed with another seed": with_run(
        r"run\.seed must stay as it was when a run is resumed \(0\), but it is 5: omit it",
        lambda place, run: nemorl.run(place.sft(run={"resume": True, "seed": 5})),
    ),
    "resumed with another model": with_run(
        r"must be of the model in use, but differs in .*name the model of that run",
        lambda place, run: nemorl.run(place.resumed(), model=tiny_model(hidden_size=16)),
    ),
    "resumed from half a checkpoint": with_run(
        NONE_WHOLE, resume_damaged("trainer/model.safetensors", half), CheckpointError
    ),
    "resumed from a damaged checkpoint": with_run(
        NONE_WHOLE, resume_damaged("trainer/optimizer.safetensors", flip_a_bit), CheckpointError
    ),
    "resumed from a checkpoint without its state": with_run(
        NONE_WHOLE, resume_damaged("state.json", Path.unlink), CheckpointError
    ),
    "a checkpoint of another version": with_run(
        r"it has format 99, and this version of nemorl reads format 3",
        lambda place, run: (
            damage(
                run,
                "manifest.json",
                lambda path: path.write_text(
                    json.dumps({**json.loads(path.read_text()), "format": 99})
                ),
            ),
            checkpoint.verify(run / "checkpoints" / "step_1"),
        ),
        CheckpointError,
    ),
    "settings of the run that can't be read": with_run(
        r"config\.yaml, line 1: not valid YAML",
        lambda place, run: (
            spoil(run / "config.yaml", lambda path: path.write_text("{")),
            command("sft", "--run.dir", str(run), "--run.resume"),
        ),
        Refused,
    ),
    "a metric that there isn't": Case(
        lambda place: nemorl.run(place.sft(run={"stop_when": "acuracy > 1"})),
        r"run\.stop_when must name a metric that the run has, but it is 'acuracy': .*there are ",
        saved=1,
    ),
    "a best checkpoint by no metric": Case(
        lambda place: nemorl.run(place.sft(run={"metric": "los"})),
        r"run\.metric must name a metric that the run has, but it is 'los'; did you mean loss\?",
        saved=1,
    ),
    "a rule about a validation without one": Case(
        lambda place: nemorl.run(place.sft(run={"stop_when": "val_loss < 1"})),
        r"run\.stop_when must be a metric of the training where there is no validation, but it is"
        r" 'val_loss < 1': give data\.validation",
    ),
    "export of a step without a checkpoint": with_run(
        r"step must be that of a checkpoint in .*, but there is none for 7: there are step_1",
        lambda place, run: nemorl.export(
            nemorl.ExportConfig(run=str(run), output=str(place.folder / "out"), step=7)
        ),
    ),
    "export of the best of a run that ranks none": with_run(
        r"step must be that of a checkpoint in .*, but there is none for best: there are step_1 and"
        r" no run\.metric that ranks them",
        lambda place, run: nemorl.export(
            nemorl.ExportConfig(run=str(run), output=str(place.folder / "out"), step="best")
        ),
    ),
    "export over other things": with_run(
        r"output must be a new folder or an earlier export, but .* holds other things"
        r" \(thesis\.txt\): name another",
        lambda place, run: (
            place.write("thesis.txt", "years"),
            nemorl.export(
                nemorl.ExportConfig(run=str(run), output=str(place.folder / "thesis.txt"))
            ),
        ),
    ),
    "a run that was not exported as a model": with_run(
        r"model must have been exported, but the run .* has no hf/ yet: nemorl export --run",
        lambda place, run: nemorl.generate(nemorl.GenerateConfig(model=str(run), prompt=("1",))),
    ),
}

GROUPS = {
    "settings": SETTINGS,
    "devices": DEVICES,
    "yaml": YAML,
    "flags": FLAGS,
    "data": DATA,
    "models": MODELS,
    "rewards": REWARDS,
    "runs": RUNS,
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A model folder, a file of rows, and a finished run of one step."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model(scale=2.0).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in addition_rows()))
    place = Place(folder, folder)
    nemorl.run(place.sft(run={"dir": str(folder / "finished")}))
    return folder


def results(run: Path) -> dict[str, bytes]:
    """What nobody may lose: metrics, samples, checkpoints and export of a run, but for files that a
    case has damaged itself.
    """
    kept = [
        run / "metrics.jsonl",
        *(run / "samples").glob("*"),
        *(run / "checkpoints").rglob("*.safetensors"),
        *(run / "hf").glob("*"),
    ]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in kept if path.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, shared: Path, tmp_path: Path, monkeypatch):
    case, place = CASES[name], Place(tmp_path, shared)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(case.error) as caught:
        case.provoke(place)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert_matches(case.message, text)
    assert not (tmp_path / "runs").exists(), "a folder that nobody named"
    after = results(place.run_folder)
    if case.saved is not None:
        assert checkpoint.latest(place.run_folder).name == f"step_{case.saved}"
        assert (
            f"a checkpoint of step {case.saved}: go on from there with --run.dir {place.run_folder}"
            " --run.resume" in text
        )
    elif after:
        before = results(shared / "finished")
        assert (after.keys(), after["metrics.jsonl"]) == (before.keys(), before["metrics.jsonl"])


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.DOTALL), text


def test_the_table_is_long_enough():
    assert len(CASES) >= 80
