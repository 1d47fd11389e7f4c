"""Code that a run folder or a config file names runs only where the command line allows it."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemorl
from nemorl.runtime.cli.main import main, parse
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.tree import from_dict, leaves, own_sections, to_dict
from nemorl.runtime.config.yaml_io import (
    IMPORTED,
    SECRET,
    ConfigError,
    Trust,
    code_of,
    dump,
    read,
    without_secrets,
)
from nemorl.runtime.run.launch import changes, open_directory
from nemorl.runtime.run.registry import ALGORITHMS
from tests.examples import forgetting_own

MODULE = """
from pathlib import Path

Path(__file__).with_name("marker").touch()

def right(response, answer): return float(response[:1] == answer[:1])
def loss(logprobs, prev, advantages, weights, *, scale: float = 1.0):
    return -scale * (weights * advantages * logprobs).where(weights != 0, 0.0).sum()
"""
REWARD, LOSS = "./of_mine.py:right", "./of_mine.py:loss"
FILE = f"reward: {REWARD}\nloss:\n  name: {LOSS}\n  scale: 2.0\n"
EVAL = "eval --model copy --validation rows.jsonl"
RESUME = "grpo --run.dir copy --run.resume"
CONFIG = "grpo --config mine.yaml"
SCRIPT = "their_loop.py --run.dir copy --run.resume"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with code, a file of settings that names it, and a run that does."""
    (tmp_path / "of_mine.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(FILE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/config.yaml").write_text(FILE)
    (tmp_path / "copy/metrics.jsonl").write_text('{"step": 1, "time": 0.0, "phase": "train"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with forgetting_own():
        yield tmp_path
    sys.modules.pop("of_mine", None)


def said_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> str:
    """What a refused command, or a script's `cli`, prints."""
    first, *args = shlex.split(command)
    if first.endswith(".py"):
        monkeypatch.setattr(sys, "argv", [first, *args])
        with pytest.raises(SystemExit) as stop:
            nemorl.cli(GRPOConfig)
        assert stop.value.code == 2
    else:
        assert main([first, *args]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text", "flags"),
    [
        (EVAL, "", f"--reward {REWARD}"),
        (RESUME, "", f"--reward {REWARD} --loss {LOSS}"),
        (SCRIPT, "", f"--reward {REWARD} --loss {LOSS}"),
        (CONFIG, "", f"--reward {REWARD} --loss {LOSS}"),
        (f"{RESUME} --reward {REWARD}", "", f"--loss {LOSS}"),
        (f"{RESUME} --trust-code --no-trust-code --reward math", "", f"--loss {LOSS}"),
        (f"{CONFIG} --print-config", "", f"--loss {LOSS}"),
        (f"{CONFIG} --print-config --no-print-config --loss gspo", "", f"--reward {REWARD}"),
        ("grpo", "loss: {name: 'evil:fn'}", "--loss evil:fn"),
        ("sft", "{reward: '~/my f.py:fn'}", "--reward '~/my f.py:fn'"),
        ("eval", "rollout: {environment: ./e.py:Env}", "--rollout.environment ./e.py:Env"),
        (
            "grpo",
            "rollout: {workers: 1, worker: {num_cpus: 1, runtime_env: {py_executable: ./p}}}",
            '--rollout.worker \'{"num_cpus": 1, "runtime_env": {"py_executable": "./p"}}\'',
        ),
        ("sft", "generation: {python: ./evil}", "--generation.python ./evil"),
        (
            "grpo",
            "generation: {engine: {dtype: half, scheduler_cls: evil.Scheduler}}",
            '--generation.engine \'{"dtype": "half", "scheduler_cls": "evil.Scheduler"}\'',
        ),
        (
            "grpo",
            "generation: {engine: {kv_transfer_config: {a: [{module_path: evil}]}}}",
            '--generation.engine \'{"kv_transfer_config": {"a": [{"module_path": "evil"}]}}\'',
        ),
        ("eval --model m", "reward: [math, 'evil:fn']", "--reward math evil:fn"),
        (
            "grpo",
            "reward: {a: math, b: [code, 'evil:fn']}",
            '--reward \'{"a": "math", "b": ["code", "evil:fn"]}\'',
        ),
        (
            "grpo",
            "rollout: {environment: {a: calculator, b: 'evil:Env'}}",
            '--rollout.environment \'{"a": "calculator", "b": "evil:Env"}\'',
        ),
        (
            "data inspect --data.train rows.jsonl",
            "model: {path: m, trust_remote_code: true}",
            "--model.trust-remote-code",
        ),
        (
            "export --output new",
            "{run: copy, trust_remote_code: true}",
            "--trust-remote-code",
        ),
    ],
)
def test_a_file_alone_may_not_name_code(
    folder: Path, command: str, text: str, flags: str, capsys, monkeypatch
):
    """The error has the command to type, which is then not refused for this."""
    file = "other.yaml" if text else "mine.yaml" if CONFIG in command else "copy/config.yaml"
    if text:
        Path(file).write_text(text)
        command += f" --config {file}"
    said = said_of(command, capsys, monkeypatch)
    program = "python" if command == SCRIPT else "nemorl"
    assert f"error: {file}, line " in said and "which a file alone may not decide" in said
    typed = f"{command} {flags}"
    assert f"type\n  {program} {typed}\nor add --trust-code for all" in said
    assert not Path("marker").exists()
    if program == "nemorl":
        for allowed in (typed, f"{command} --trust-code"):
            main(shlex.split(allowed))
            assert "may not decide" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--trust-code=true", f"--reward {REWARD} --loss of_mine.py:loss"]
)
@pytest.mark.parametrize("command", [RESUME, CONFIG])
def test_code_runs_that_the_command_line_names_too(folder: Path, command: str, flags: str):
    config = parse("grpo", f"{command} {flags}".split()[1:])
    assert Path("marker").exists()
    assert (config.reward, config.loss.scale) == (REWARD, 2.0), "the file's settings are kept"


@pytest.mark.parametrize(
    "command",
    [
        "report copy",
        "plan --config mine.yaml --gpus 1 --gpu-memory 80",
        f"{RESUME} --reward exact_match --loss clipped --print-config",
    ],
)
def test_nothing_is_run_where_it_is_not_needed(folder: Path, command: str, capsys):
    main(command.split())
    assert "may not decide" not in capsys.readouterr().err and not Path("marker").exists()


def test_settings_without_code_need_nothing(folder: Path):
    tree = {
        "reward": "math",
        "loss": "gspo",
        "model": {"trust_remote_code": False, "chat_template": "{{ a:b }}"},
        "generation": {
            "python": None,
            "engine": {"quantization": "fp8", "dtype": "half", "revision": "", "max_num_seqs": 4},
        },
        "rollout": {"environment": "calculator", "worker": {"num_cpus": 1, "resources": {"a": 1}}},
    }
    assert code_of(tree) == {}
    Trust().require(tree)


def test_no_section_of_functions_is_forgotten():
    for algorithm in ALGORITHMS.values():
        assert own_sections(algorithm.config).keys() <= {*IMPORTED}


def test_python(folder: Path):
    refused = r"line 1: reward, loss would run .*: if you trust it, pass trust_code=True, or set"
    with pytest.raises(ValueError, match=refused):
        nemorl.load_config(GRPOConfig, "mine.yaml")
    with pytest.raises(ValueError, match=r"copy/config\.yaml.*reward would run .* trust_code=True"):
        nemorl.evaluate("copy", "rows.jsonl", device="cpu")
    for given, imported in (({"reward": "exact_match"}, False), ({"trust_code": True}, True)):
        with pytest.raises(ValueError, match="model must have been exported"):
            nemorl.evaluate("copy", "rows.jsonl", device="cpu", **given)
        assert Path("marker").exists() == imported
    assert nemorl.load_config(GRPOConfig, "mine.yaml", trust_code=True).loss.scale == 2.0


SECRETS = {name: ["sesame", {"a": "sesame"}] for name in ("api_key", "HF_TOKEN", "authToken")}
SECRETS |= {"db-password": 1234567, "secret": "sesame"}
HARMLESS = {"max_tokens": 5, "pad_token": "<pad>", "tokenizer": "t", "prompt_key": "q", "key": None}
ENV = {"env_vars": {"MY_VAR": "sesame"}, "pip": ["numpy"]}


def with_secrets(run: str) -> GRPOConfig:
    rollout = {"environment": "calculator", "workers": 1, "worker": {"runtime_env": ENV}}
    of_reward = {"x": [SECRETS | HARMLESS]}
    return from_dict(
        GRPOConfig, {"reward_kwargs": of_reward, "rollout": rollout, "run": {"dir": run}}
    )


def test_no_file_and_no_output_has_a_secret(folder: Path, capsys):
    config = with_secrets("secret")
    directory = open_directory(config, "grpo", restarted=False)
    kept, said = directory.config.read_text(), repr(nemorl.GRPOTrainer("m", args=config))
    Path("s.yaml").write_text(dump(to_dict(config)))
    main(["grpo", "--config", "s.yaml", "--print-config"])
    main(["grpo", "--config", "s.yaml"])  # which is refused, with what to type
    for text in (kept, said, *capsys.readouterr()):
        assert SECRET in text and "sesame" not in text and "1234567" not in text, text
    assert read(directory.config)[0]["reward_kwargs"]["x"][0].items() >= HARMLESS.items()
    assert directory.path.stat().st_mode & 0o777 == 0o700


def test_no_setting_of_ours_is_taken_for_a_secret():
    for algorithm in ALGORITHMS.values():
        for key in leaves(algorithm.config):
            assert without_secrets("text", key) == "text", key


def test_a_resumed_run_asks_for_its_secret(folder: Path, capsys):
    kept = {"reward_kwargs": {"api_key": SECRET, "n": 1}, "data": {"train": "rows.jsonl"}}
    Path("copy/config.yaml").write_text(dump(kept))
    asked = """--reward-kwargs '{"api_key": "<secret, not kept>", "n": 1}' with your own"""
    for command in (f"{RESUME} --model m", EVAL):
        assert asked in said_of(command, capsys, None)
    with pytest.raises(ConfigError, match="reward_kwargs must be given again, as no file keeps"):
        nemorl.load_config(GRPOConfig, "copy/config.yaml")
    with pytest.raises(ConfigError, match="reward_kwargs must be given again"):
        nemorl.evaluate("copy", "rows.jsonl", device="cpu")
    args = [*f"{RESUME} --model m --reward-kwargs".split()[1:], '{"api_key": "sk", "n": 1}']
    assert parse("grpo", args).reward_kwargs == {"api_key": "sk", "n": 1}
    assert changes("copy/config.yaml", parse("grpo", args)) == ["model.path is 'm', was ''"]
