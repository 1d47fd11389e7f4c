"""The command line: every key is a flag, four layers, errors that help, and speed."""

import asyncio
import dataclasses
import re
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import nemorl
from nemorl import ClippedLoss, GenerationConfig, GRPOConfig, GSPOLoss, ReinforcePlusPlusAdvantage
from nemorl.runtime.cli import main as cli
from nemorl.runtime.cli.commands import inspect_data
from nemorl.runtime.cli.settings import EvalConfig, GenerateConfig, InspectConfig
from nemorl.runtime.config.flags import flag_of
from nemorl.runtime.config.tree import (
    dump_yaml,
    from_dict,
    leaves,
    load_config,
    unions,
    unused,
    walk,
)
from nemorl.runtime.run.registry import ALGORITHMS
from tests.tiny_models import tiny_tokenizer

NEEDED = {
    "sft": ["--model.path", "m", "--data.train", "d"],
    "grpo": ["--model.path", "m", "--data.train", "d"],
    "eval": ["--model", "m", "--data.validation", "d"],
    "generate": ["--model", "m", "--prompt", "p"],
    "export": ["--run", "r", "--output", "o"],
}

DIR = ("--run.dir", "runs/mine")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("NEMORL_TRACEBACK", raising=False)


def grpo(*args: str) -> GRPOConfig:
    config = cli.parse("grpo", [*NEEDED["grpo"], *args])
    assert isinstance(config, GRPOConfig)
    return config


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a command that must fail with code 2 says, box drawing removed."""
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", captured.err).split())


# Help


@pytest.mark.parametrize("command", [*ALGORITHMS, *cli.COMMANDS])
def test_every_key_is_a_flag_with_help(command: str, capsys):
    cls = (ALGORITHMS.get(command) or cli.COMMANDS[command]).config
    members = [(section, name) for section, found in unions(cls).items() for name in found]
    seen, hidden = set[str](), unused(cls)
    for section, name in [each for each in members if ":" not in each[1]] or [("", "")]:
        chosen = [f"--{section}", name] if section else []
        assert cli.main([command, *chosen, "--help", "all"]) == 0
        text = capsys.readouterr().out
        assert "--print-config" in text and ("--preset" in text) == (command == "grpo")
        for key, hint, doc, _ in walk(cls, {section: {"name": name}}):
            flag, head = flag_of(key), key.rpartition(".")[0]
            seen.add(key)
            if key in hidden:
                assert f"{flag} " not in text
            elif key == f"{head}.name" and head in unions(cls):
                assert re.search(rf"--{head} \{{.*{name}.*\}}", text) or head != section, flag
            elif not dataclasses.is_dataclass(hint):
                assert doc and " ".join(doc.split()[:4]) in text, flag
                positional = "Positional" in str(hint)
                assert positional or re.search(rf"{re.escape(flag)}[ ,=]", text), flag
                if hint is bool:
                    dot = flag.rfind(".") + 1 or 2
                    assert f"{flag[:dot]}no-{flag[dot:]}" in text
    assert seen >= leaves(cls).keys()


def test_help_shows_defaults_and_the_selectors(capsys):
    parts = ["--loss {clipped,gspo,cispo,sapo,gmpo,reinforce,module:function}", "(default: 1e-05)"]
    about = ["AdamW or another optimizer, its learning-rate schedule", "dr_grpo: "]
    for topic, wanted in {(): parts, ("all",): parts + about}.items():
        assert cli.main(["grpo", "--help", *topic]) == 0
        text = capsys.readouterr().out
        assert all(part in text for part in wanted)
    assert cli.main(["plan", "--help"]) == 0 and "over. (required)" in capsys.readouterr().out


def test_help_shows_the_usual_settings_then_sections(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def shown(*args: str) -> list[str]:
        assert cli.main(args) == 0
        said = capsys.readouterr()
        assert said.err == "" and (len(args) > 2 or said.out.count("\n") <= 60)
        return re.findall(r"^ +(--\w[\w.-]*)", said.out, re.MULTILINE)

    usual = shown("grpo", "--help")
    assert 18 <= len(usual) - len(["config", "preset", "print-config", "trust-code"]) <= 24
    assert {"--optimizer.lr", "--num-prompts-per-step", "--run.dir", "--data.chat"} <= {*usual}
    assert {"--rollout.environment", "--async.max-staleness"} <= {*usual}
    assert "--parallel.tp" in shown("plan", "--help") and shown("plan", "--help", "parallel")
    assert "--optimizer.beta1" not in usual and "--reward-weights" not in usual
    optimizer = shown("grpo", "--help", "optimizer")
    assert len(optimizer) == 12 and all(flag.startswith("--optimizer.") for flag in optimizer)
    assert "--reduction" in shown("grpo", "--help", "grpo")
    own = shown("grpo", "--loss", "gspo", "--help")
    assert "--loss.token-gradient" in own and "--loss.dual-clip" not in own
    assert "--generation.temperature" in shown("eval", "--help")


def test_top_help_teaches(capsys):
    for args in ([], ["--help"]):
        assert cli.main(args) == 0
        text = capsys.readouterr().out
        assert all(f"  {command} " in text for command in [*ALGORITHMS, *cli.COMMANDS])
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("nemorl ")


def test_the_commands_that_help_shows_parse(tmp_path: Path, monkeypatch, capsys):
    import shlex

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/rl").mkdir(parents=True)
    for path in ("my.yaml", "runs/rl/config.yaml"):
        Path(path).write_text(
            dump_yaml(from_dict(GRPOConfig, {"model": {"path": "m"}, "data": {"train": "d"}}))
        )
    shown = [
        line.split("      ")[0].split(" > ")[0]
        for line in cli.HELP.splitlines()
        if line.startswith("  nemorl ")
    ]
    assert len(shown) >= 7
    for line in shown:
        _, command, *args = shlex.split(line)
        if args and f"{command} {args[0]}" in cli.COMMANDS:
            command = f"{command} {args.pop(0)}"
        cli.parse(command, args)
    capsys.readouterr()


@pytest.mark.parametrize(
    "args", [["--help"], ["grpo", "--help"], ["generate", "--help"]], ids=" ".join
)
def test_help_is_fast_and_without_torch(args: list[str]):
    """By the calls of Python functions that it makes, which no other program changes."""
    code = (
        "import sys; calls = []; sys.setprofile(lambda _, event, __: event == 'call' and"
        " calls.append(1)); from nemorl.runtime.cli.main import main; code = main(sys.argv[1:]);"
        " sys.setprofile(None); assert 'torch' not in sys.modules; print(len(calls));"
        " sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert int(result.stdout.splitlines()[-1]) < 600_000  # `grpo --help` makes 390,000


# Layers


def test_four_layers(tmp_path: Path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "loss: {clip_low: 0.1}\nkl: {coef: 0.5}\noptimizer: {lr: 1e-6}\nreduction: group_mean\n"
    )
    assert grpo().loss == ClippedLoss()
    assert grpo("--preset", "dapo").loss == ClippedLoss(clip_high=0.28)
    config = grpo("--preset", "dapo", "--config", str(path), "--optimizer.lr", "2e-6")
    assert config.loss == ClippedLoss(clip_low=0.1, clip_high=0.28)
    assert (config.reduction, config.dynamic_sampling) == ("group_mean", True)
    assert (config.kl.coef, config.optimizer.lr) == (0.5, 2e-6)
    assert grpo(f"--config={path}", "--kl.coef=0.0").kl.coef == 0.0, "also a default's value"


def test_a_flag_can_repair_what_the_file_alone_would_break(tmp_path: Path):
    path = tmp_path / "my.yaml"
    path.write_text("trainer: {micro_batch_tokens: 64}\n")
    config = grpo("--config", str(path), "--data.max-total-sequence-length", "64")
    assert config.trainer.micro_batch_tokens == 64
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_tokens must hold the longest"):
        grpo("--config", str(path))


def test_a_setting_by_its_last_name():
    config = grpo("--lr", "3e-6", "--max_new_tokens=16", "--resume=true", "--no-shuffle", *DIR)
    assert (config.optimizer.lr, config.generation.max_new_tokens) == (3e-6, 16)
    assert (config.run.resume, config.data.shuffle) == (True, False)
    assert grpo("--generation.stop-strings", "\n", "END").generation.stop_strings == ("\n", "END")
    assert grpo("--resume", "auto", *DIR, "--run.no-resume").run.resume is False
    assert grpo("--data.no-shuffle=false").data.shuffle is True
    for value, expected in {"": True, "=null": None, "=false": False}.items():
        config = grpo(f"--trainer.offload-during-generation{value}")
        assert config.trainer.offload_during_generation is expected
    assert grpo("--loss.name", "gspo", "--token-gradient").loss == GSPOLoss(token_gradient=True)
    assert grpo("--max-grad-norm", "null", "--gap.stop", "null").optimizer.max_grad_norm is None
    assert grpo("--reward", "a", "b", "--stop", "1.5").reward == ("a", "b")
    named = grpo("--reward", '{"m": ["a", "b"], "n": "c"}', "--reward-weights", '{"m": [1, 0.5]}')
    assert named.reward == {"m": ("a", "b"), "n": "c"} and named.reward_weights == {"m": (1, 0.5)}
    led = grpo("--environment", '{"n": "calculator"}', "--environment-column", "task")
    assert led.rollout.environment == {"n": "calculator"} and led.data.environment_column == "task"
    assert grpo("--data", "e", "--model", "n", "--run", "r").data.train == "e"
    template = ["--chat", "--model.chat-template", "t", "--prompt", "model.path=x", "--chat=true"]
    answer = cli.parse("generate", ["--model", "m", *template])
    assert (answer.model.chat_template, answer.prompt) == ("t", ("model.path=x",))
    assert cli.parse("dpo", ["--model", "m", "--beta", "0.3"]).loss.beta == 0.3


def test_the_later_of_several_configs_wins(tmp_path: Path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("optimizer: {lr: 1e-6, eps: 1e-9}\n")
    second.write_text("optimizer: {lr: 2e-6}\n")
    with pytest.warns(UserWarning, match=r"of several --config the later wins: .*a\.yaml <.*b\."):
        config = grpo("--config", str(first), "--config", str(second))
    assert (config.optimizer.lr, config.optimizer.eps) == (2e-6, 1e-9)


def test_unions(tmp_path: Path):
    assert grpo("--loss.clip-low", "0.1", "--loss=gspo", "--loss.token-gradient").loss == GSPOLoss(
        clip_low=0.1, token_gradient=True
    )
    assert grpo(
        "--advantage", "reinforce_plus_plus", "--advantage.kl-coef", "0.1"
    ).advantage == ReinforcePlusPlusAdvantage(kl_coef=0.1)
    path = tmp_path / "my.yaml"
    path.write_text("loss: {name: gspo, clip_low: 0.1}\n")
    assert grpo("--config", str(path), "--loss", "gspo").loss == GSPOLoss(clip_low=0.1)
    afresh = grpo("--config", str(path), "--loss", "clipped")
    assert afresh.loss == ClippedLoss()


@pytest.mark.parametrize(
    "args",
    [
        ["grpo", *NEEDED["grpo"], "--preset=dapo", "--loss=gspo", "--stop-strings", "\n", "1e-5"],
        ["sft", *NEEDED["sft"], "--max-num-steps", "3", "--trainer.sequence-packing"],
        ["eval", *NEEDED["eval"], "-n", "2", "--temperature", "0.5"],
    ],
    ids=lambda args: " ".join(args)[:50],
)
def test_print_config_round_trips(args: list[str], tmp_path: Path, capsys):
    command, *rest = args
    assert cli.main([*args, "--print-config"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    config = cli.parse(command, rest)
    assert cli.parse(command, ["--config", str(path)]) == config == load_config(type(config), path)
    assert dump_yaml(config, comments=True) == printed


@pytest.mark.slow
def test_print_config_checks_all_that_needs_no_model(tmp_path: Path, monkeypatch, capsys):
    """It says so before it prints, and runs no code of the user's."""
    monkeypatch.chdir(tmp_path)
    code = "import os\nos._exit(9)\nif True:\n    def right(): ...\ndef left(): ...\n"
    Path("mine.py").write_text(code)
    Path("broken.py").write_text("a = 1\ndef right(:\n")
    Path("rows.jsonl").write_text('{"prompt": "1+1="}\n{"question": "1+1="}\n')
    for flags, message in {
        "--reward nope": "reward must be one of choice, code, contains_answer",
        "--reward ./mine.py:wrong": "but mine.py has no 'wrong': it has left",
        "--reward mine.py": "but mine.py is a whole file: it has left",
        "--rollout.environment mine.py": "but mine.py is a whole file: it has left",
        "--loss ./nope.py:right": "loss must name a module or a .py file, but there is no module",
        "--loss mine.py": "but mine.py is a whole file: it has left",
        "--reward broken:right": "can read, but broken.py, line 2: invalid syntax",
        "--reward no_such_module:right": "there is no module 'no_such_module'",
        "--data.train rows.jsonl": "rows.jsonl, line 2: a row needs a prompt",
        "--data.train rows.jsonl --data.prompt-column q": "but rows.jsonl, line 1 has the columns",
    }.items():
        assert message in refused(capsys, "grpo", *flags.split(), "--print-config")
    for reward in ("./mine.py:right", "mine:right", "math", "json:loads", "os.path:join"):
        assert cli.main(["grpo", "--reward", reward, "--print-config"]) == 0
        assert yaml.safe_load((said := capsys.readouterr()).out)["reward"] == reward
        assert not said.err


def test_print_config_for_another_machine(capsys):
    with pytest.warns(
        UserWarning, match=r"rows are not checked: data\.train must name an existing"
    ):
        assert cli.main(["sft", "--data.train", "/there/rows.jsonl", "--print-config"]) == 0
    assert "train: /there/rows.jsonl" in capsys.readouterr().out


# Errors

BAD = [
    (["grpo", "--optimizer.lrr", "3"], "--optimizer.lrr; did you mean --optimizer.lr?"),
    (["grpo", "--run.resume=maybe"], "run.resume must be true or false or auto, but it is 'maybe'"),
    (["sft", "lr=1e-5"], "unknown setting lr: write --optimizer.lr 1e-5"),
    (
        ["grpo", "--backend", "vllm"],
        "unknown setting --backend: write --trainer.backend or --generation.backend",
    ),
    (["grpo", "--help", "optimiser"], "--help has no section 'optimiser'; did you mean optimizer?"),
    (
        ["eval", *NEEDED["eval"], "--generation.colocated"],
        "unknown setting --generation.colocated: eval does not use it",
    ),
    (["--import", "--help"], "--import must name a module: nemorl --import MODULE COMMAND"),
    (["export", "r"], "Missing from nemorl export: --output STR"),
    (
        ["rloo"],
        "unknown command 'rloo'; write nemorl grpo --preset rloo",
    ),
    (["grpo", "--preset", "ppo"], "unknown preset 'ppo'; write nemorl ppo, which has a critic"),
    (["grpo", "--loss", "dapo"], "but it is 'dapo'; write nemorl grpo --preset dapo"),
    (["grpo", "--generation.engine", "0.5"], """: write one, such as '{"name": 0.5}'"""),
    (["sft", "--run.dir", "none", "--run.resume"], "to resume, but there is none in"),
]


@pytest.mark.parametrize(
    "args, message", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_flags(args: list[str], message: str, capsys):
    said = refused(capsys, *args)
    assert message in said and "NEMORL_TRACEBACK" not in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("runs/x/checkpoints/step_5", "(it is a part of the run runs/x): name runs/x"),
        ("gguf/m.gguf", "(it is a model in the GGUF format): name the folder of safetensors"),
        ("one.safetensors", "(it is a single file): name the folder with config.json"),
        ("empty", "(it is an empty folder)"),
    ],
)
def test_what_is_no_model_is_named_before_the_rows(
    model: str, said: str, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/x/checkpoints/step_5", "gguf", "empty"):
        Path(folder).mkdir(parents=True)
    for file in ("runs/x/config.yaml", "gguf/m.gguf", "one.safetensors"):
        Path(file).touch()
    Path("rows.jsonl").write_text('{"question": "1+1="}\n')
    message = refused(capsys, "eval", "--model", model, "--validation", "rows.jsonl")
    assert (
        f"model.path must be a folder with a Hugging Face model or a hub name, but {model!r}"
        in message
    )
    assert said in message


def test_a_run_brings_its_settings_to_eval_and_generate(tmp_path: Path, capsys):
    run, data = str(tmp_path / "run"), ["--validation", "d"]
    config = from_dict(
        GRPOConfig,
        {
            "data": {"prompt_column": "q", "system_prompt": "s", "chat": True, "train": "t"},
            "generation": {"max_new_tokens": 7, "stop_strings": ["."], "temperature": 0.5},
            "reward": ["math", "think_format"],
            "reward_weights": [1.0, 0.5],
            "reward_kwargs": {"tolerance": 0.1},
        },
    )
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(config))
    model = nemorl.ModelConfig(path=run)
    prompts: dict[str, Any] = {"prompt_column": "q", "system_prompt": "s", "chat": True}
    lengths: dict[str, Any] = {"max_new_tokens": 7, "stop_strings": (".",)}
    expected = GenerateConfig(
        model=model,
        prompt=("p",),
        data=nemorl.DataConfig(**prompts),
        generation=GenerationConfig(**lengths),
    )
    assert cli.parse("generate", ["--model", run, "--prompt", "p"]) == expected
    told = f"settings of the run {run}: data.prompt_column 'q', data.system_prompt 's'"
    told += ", data.chat True, generation.max_new_tokens 7"
    assert capsys.readouterr().err == f"{told}, generation.stop_strings ('.',)\n"
    greedy: dict[str, Any] = {"generation": GenerationConfig(temperature=0.0, **lengths)}
    rows = nemorl.DataConfig(validation="d", **prompts)
    rewards: dict[str, Any] = {"reward": ("math", "think_format"), "reward_weights": (1.0, 0.5)}
    rewards["reward_kwargs"] = {"tolerance": 0.1}
    expected = EvalConfig(model=model, data=rows, **greedy, **rewards)
    assert cli.parse("eval", ["--model", run, *data]) == expected
    plain = dataclasses.replace(rows, chat=False, system_prompt=None)
    flags = ["--no-chat", "--system-prompt", "null"]
    own = cli.parse("eval", ["--model", run, *data, *flags])
    assert own == dataclasses.replace(expected, data=plain)
    settings = f"model: {{path: {run}}}\ndata: {{chat: false, system_prompt: null}}\n"
    (tmp_path / "my.yaml").write_text(settings)
    assert cli.parse("eval", ["--config", str(tmp_path / "my.yaml"), *data]) == own
    (tmp_path / "run" / "hf").rmdir()  # a folder with some config.yaml
    own = EvalConfig(model=model, data=nemorl.DataConfig(validation="d"))
    assert cli.parse("eval", ["--model", run, *data]) == own


# Commands, over a launch module of the test's own


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands for what starts runs and evaluates: returns `result`, or raises it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    seen = types.SimpleNamespace(result=None)

    def answer(config: Any) -> Any:
        if isinstance(seen.result, BaseException):
            raise seen.result
        return seen.result

    for room, name, functions in (
        ("nemorl.runtime.run", "open_run", ["run"]),
        ("nemorl.runtime.cli", "inference", ["evaluate_config", "generate_config"]),
    ):
        module: Any = types.ModuleType(f"{room}.{name}")
        vars(module).update(dict.fromkeys(functions, answer))
        monkeypatch.setitem(sys.modules, f"{room}.{name}", module)
        monkeypatch.setattr(import_module(room), name, module, raising=False)
    return seen


def test_errors_of_a_command_are_one_line(launched, monkeypatch, capsys):
    launched.result = ValueError("the prompt column is missing")
    assert "nemorl grpo: error: the prompt column is missing (NEMORL_TRACEBACK=1 shows" in refused(
        capsys, "grpo", *NEEDED["grpo"]
    )
    launched.result = OSError("disk full")
    assert (
        cli.main(["grpo", *NEEDED["grpo"]]) == 1 and "error: disk full" in capsys.readouterr().err
    )
    launched.result = RuntimeError("a bug of ours")
    with pytest.raises(RuntimeError, match="a bug"):  # keeps its traceback
        cli.main(["grpo", *NEEDED["grpo"]])
    monkeypatch.setenv("NEMORL_TRACEBACK", "1")
    launched.result = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        cli.main(["grpo", *NEEDED["grpo"]])


def test_interrupt(launched, capsys):
    launched.result = KeyboardInterrupt()
    for command in ("grpo", "eval"):
        assert cli.main([command, *NEEDED[command]]) == 130
        assert capsys.readouterr().err == f"nemorl {command}: interrupted\n"
    launched.result.add_note("runs/mine has a checkpoint")
    assert cli.main(["grpo", *NEEDED["grpo"]]) == 130
    assert capsys.readouterr().err == "nemorl grpo: interrupted\nruns/mine has a checkpoint\n"


# The package's face


def test_a_module_that_registers(tmp_path: Path, monkeypatch, capsys):
    code = """
from dataclasses import dataclass
import nemorl

@dataclass(frozen=True, kw_only=True)
class MineConfig(nemorl.BaseConfig):
    "An algorithm of mine."

@nemorl.register_algorithm("mine_of_cli", config=MineConfig)
def loop(run):
    raise ValueError("prepared")
"""
    (tmp_path / "mine_of_cli.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    try:
        assert cli.main(["--import", "mine_of_cli", "--help"]) == 0
        assert "An algorithm of mine" in capsys.readouterr().out
        command = ["--import", "mine_of_cli.py", "mine_of_cli", *NEEDED["sft"], "--print-config"]
        assert cli.main(command) == 0
    finally:
        ALGORITHMS.pop("mine_of_cli", None)


def test_warnings_and_pipes(launched, capfd, monkeypatch):
    import warnings

    def warn(config: Any) -> None:
        text = warnings.formatwarning("mind the gap", UserWarning, "ours.py", 1)
        print(text, end="", file=sys.stderr)

    monkeypatch.setattr(sys.modules["nemorl.runtime.run.open_run"], "run", warn)
    assert cli.main(["grpo", *NEEDED["grpo"]]) == 0
    assert capfd.readouterr().err == "warning: mind the gap\n"
    assert warnings.formatwarning("mind", UserWarning, "theirs.py", 1).startswith("theirs.py")
    program = f"{sys.executable} -m nemorl.runtime.cli.main --help | true"
    assert subprocess.run(program, shell=True, capture_output=True).stderr == b""


@pytest.mark.parametrize(
    "note",
    [
        "This was reward 'mine' for prompt 'p' and response 'r'.",
        "This was environment 'mine', made once to see its class.",
        "This ended 4 of 4 conversations, the first about row 1, in turn 2 (environment 'mine').",
    ],
)
def test_the_traceback_of_code_of_the_users_is_theirs(launched, capsys, note: str):
    async def step():
        raise KeyError("answer")

    with pytest.raises(KeyError) as caught:
        asyncio.run(step())
    caught.value.add_note(note)
    launched.result = caught.value
    assert cli.main(["grpo", *NEEDED["grpo"]]) == 1
    said = capsys.readouterr().err
    assert (
        "raise seen.result" in said
        and "in step" in said
        and "nemorl/runtime/cli/main.py" not in said
        and "asyncio/runners.py" not in said
        and "error: KeyError: 'answer'" in said
        and note in said
    )


@pytest.mark.parametrize(
    ("kind", "seen"),
    [("grpo", "prompt"), ("sft", "sft"), ("dpo", "pairs"), ("kto", "labels")],
)
def test_an_example_of_data_is_what_inspect_takes_it_for(kind: str, seen: str, tmp_path, capsys):
    file = str(tmp_path / "rows.jsonl")
    assert cli.main(["data", "example", file, "--kind", kind, "--rows", "6"]) == 0
    first = (tmp_path / "rows.jsonl").read_text()
    assert first.count("\n") == 6
    found = inspect_data(
        from_dict(InspectConfig, {"data": {"train": file}}), tokenizer=tiny_tokenizer()
    )
    assert found.kind == seen
    capsys.readouterr()
    assert "file must be new" in refused(capsys, "data", "example", file)
    assert cli.main(["data", "example", f"{file}2", "--kind", kind, "--rows", "6"]) == 0
    assert (tmp_path / "rows.jsonl2").read_text() == first
