"""Code that a run folder or a config file names runs only where it may."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nemorl
from nemorl.runtime.cli.main import main
from nemorl.runtime.config.grpo import GRPOConfig
from nemorl.runtime.config.tree import own_sections
from nemorl.runtime.config.trust import FUNCTIONS, key_file, seal_of
from nemorl.runtime.start.registry import ALGORITHMS
from tests.examples import forgetting_own
from tests.runtime.cli.test_commands import QUIET
from tests.runtime.runs import addition_rows
from tests.tiny_models import tiny_model, tiny_tokenizer

CODE = """
from pathlib import Path

Path(__file__).with_name("marker").touch()

def right(response, answer): return float(response[:1] == answer[:1])
def loss(logprobs, prev, advantages, weights, *, scale: float = 1.0):
    return -scale * (weights * advantages * logprobs).where(weights != 0, 0.0).sum()
"""
MINE = "--reward ./of_mine.py:right --loss ./of_mine.py:loss"


@contextmanager
def in_a_new_process(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as code of the user's goes, which this process imports anew."""
    patch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("of_mine", None)
    with forgetting_own():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user's with a model, data, code, and a run that was made with all of them."""
    folder = tmp_path_factory.mktemp("home")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, addition_rows(6))))
    (folder / "of_mine.py").write_text(CODE)
    flags = (
        "grpo --model.path model --data.train rows.jsonl --run.dir run --max-num-steps 1"
        f" --num-prompts-per-step 2 --num-generations-per-prompt 2 {MINE} --loss.scale 2"
    )
    with pytest.MonkeyPatch.context() as patch, in_a_new_process(patch):
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        assert main([*flags.split(), *QUIET]) == 0
    return folder


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That folder, as the working folder of a new process of its user's, without a marker."""
    monkeypatch.chdir(made)
    monkeypatch.setenv("XDG_STATE_HOME", str(made / "state"))
    shutil.copytree("run", "copy")
    shutil.copy("run/config.yaml", "mine.yaml")
    Path("marker").unlink()
    with in_a_new_process(monkeypatch):
        yield made
    shutil.rmtree(made / "copy")
    (made / "marker").touch()


@pytest.fixture
def elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same for another user, who got a copy of the run and has made runs, too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert seal_of({"reward": "./theirs.py:fn"})
    return home


EVAL = "eval --model copy --validation rows.jsonl --device cpu"
RESUME = "grpo --run.dir copy --run.resume --max-num-steps 2"
CONFIG = "grpo --config mine.yaml --run.dir new"


@pytest.mark.parametrize("command", [EVAL, RESUME, CONFIG])
def test_code_of_a_copy_runs_only_if_the_command_line_allows_it(
    elsewhere: Path, command: str, capsys
):
    for revoked in (
        [],
        ["--trust-code", "--no-trust-code"],
        ["--print-config", "--no-print-config"],
    ):
        assert main([*command.split(), *revoked]) == 2
    said, setting = capsys.readouterr().err, "reward"
    file = "mine.yaml" if "mine" in command else "copy/config.yaml"
    assert f"error: {file}, line " in said and "Traceback" not in said
    assert f"{setting} would run ./of_mine.py:right, which a file alone may not decide" in said
    assert "(its seal is of another user or machine, or of other code)" in said
    assert "add --reward ./of_mine.py:right if you trust it, or --trust-code for all that" in said
    if command != EVAL:
        assert main([*command.split(), "--reward", "./of_mine.py:right"]) == 2
        assert "loss would run ./of_mine.py:loss" in capsys.readouterr().err
    assert not Path("marker").exists()


@pytest.mark.parametrize("command", [EVAL, RESUME, f"{CONFIG} --max-num-steps 1"])
@pytest.mark.parametrize("flags", ["--trust-code=true", MINE])
def test_it_runs_if_the_command_line_says_so(elsewhere: Path, command: str, flags: str, capsys):
    flags = "--reward ./of_mine.py:right" if command == EVAL and flags == MINE else flags
    assert main([*command.split(), *flags.split()]) == 0
    assert Path("marker").exists()
    if command != EVAL:
        folder = Path("copy" if command == RESUME else "new")
        config = nemorl.load_config(GRPOConfig, folder / "config.yaml")  # has a seal by now
        assert config.loss.scale == 2.0, "settings of a function that a flag names, too, are kept"
        shutil.rmtree("new", ignore_errors=True)


@pytest.mark.parametrize(
    "command",
    [
        "generate --model copy --prompt 1+1= --device cpu",
        "report copy",
        "export --run copy --output exported",
        "data inspect --model.path model --data.train rows.jsonl",
        "plan --config mine.yaml --gpus 1 --gpu-memory 80",
        f"{EVAL} --print-config=true",
        f"{RESUME} --print-config",
        f"{CONFIG} --print-config",
        f"{CONFIG} --help",
        f"{RESUME} --reward exact_match --loss clipped",
    ],
)
def test_nothing_of_a_copy_is_run_where_it_is_not_needed(elsewhere: Path, command: str, capsys):
    assert main(command.split()) == 0
    assert not Path("marker").exists()
    shutil.rmtree("exported", ignore_errors=True)
    if "grpo" in command and "--print-config" in command:
        printed = capsys.readouterr().out
        assert "# Not checked: ./of_mine.py:loss was not imported, as only a file names" in printed
        assert "  name: ./of_mine.py:loss\n  scale: 2.0\n" in printed.replace('"', "")


@pytest.mark.parametrize("command", [EVAL, RESUME])
def test_a_run_made_here_needs_no_word(home: Path, command: str, capsys):
    assert main(command.split()) == 0
    assert Path("marker").exists()


@pytest.mark.parametrize("command", [EVAL, RESUME])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("./of_mine.py:right", "./evil.py:right"),
        ("./of_mine.py:right", "evil:right"),
        ("trust_remote_code: false", "trust_remote_code: true"),
        ("  python: null", "  python: ./evil.py"),
        ("  seal: ", "  seal: 00"),
    ],
)
def test_an_edited_config_is_refused(home: Path, command: str, before: str, after: str, capsys):
    shutil.copy("of_mine.py", "evil.py")
    file = Path("copy/config.yaml")
    text = file.read_text()
    assert text.replace('"', "").count(before) >= 1
    file.write_text(text.replace('"', "").replace(before, after))
    assert main(command.split()) == 2
    assert "(its seal is of another user or machine, or of other code): " in capsys.readouterr().err
    assert not Path("marker").exists()


def test_the_same_names_in_another_folder_are_other_code(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    shutil.copytree("copy", tmp_path / "copy")
    for name in ("of_mine.py", "rows.jsonl"):
        shutil.copy(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(EVAL.split()) == 2
    assert "or of other code" in capsys.readouterr().err
    assert not Path("marker").exists() and not (home / "marker").exists()


@pytest.mark.parametrize(
    ("text", "command", "said"),
    [
        (
            "model: {path: model, trust_remote_code: true}",
            "data inspect --data.train rows.jsonl",
            "model.trust_remote_code would run the code that comes with the model, which a file"
            " alone may not decide: add --model.trust-remote-code if you",
        ),
        ("{run: copy, trust_remote_code: true}", "export --output new", "add --trust-remote-code "),
        ("model: {path: copy, trust_remote_code: true}", "generate --prompt 1", "remote-code if"),
        ("generation: {python: ./evil}", "sft", "add --generation.python ./evil if you trust"),
        (
            "generation: {engine: {scheduler_cls: evil.Scheduler}}",
            "grpo",
            """add --generation.engine '{"scheduler_cls": "evil.Scheduler"}' if you trust it""",
        ),
        (
            "generation: {engine: {dtype: half, kv_transfer_config: {a: [{module_path: evil}]}}}",
            "grpo",
            "generation.engine would run the modules that kv_transfer_config may name, which a",
        ),
        ("reward: [math, 'evil:fn']", "eval --model m", "add --reward math evil:fn if you trust"),
        ("loss: {name: 'evil:fn'}", "grpo", "line 1: loss would run evil:fn, which"),
        ("advantage: evil:fn", "grpo --loss clipped", "line 1: advantage would run evil:fn, which"),
    ],
)
def test_all_settings_that_name_code(home: Path, text: str, command: str, said: str, capsys):
    Path("other.yaml").write_text(text)
    assert main([*command.split(), "--config", "other.yaml"]) == 2
    assert said in capsys.readouterr().err


def test_harmless_settings_need_no_trust(home: Path):
    Path("other.yaml").write_text(
        "{reward: math, loss: gspo, generation: {backend: vllm, engine: {quantization: fp8,"
        " dtype: half, kv_cache_dtype: fp8, revision: '', max_num_seqs: 4, seed: null}}}"
    )
    config = nemorl.load_config(GRPOConfig, "other.yaml")
    assert config.generation.engine["quantization"] == "fp8"
    assert seal_of({"reward": "math"}) is None


def test_no_section_of_functions_is_forgotten():
    for algorithm in ALGORITHMS.values():
        assert own_sections(algorithm.config).keys() <= {*FUNCTIONS}


def test_python(elsewhere: Path):
    with pytest.raises(ValueError, match=r"reward would run .*: pass trust_code=True if you trust"):
        nemorl.load_config(GRPOConfig, "mine.yaml")
    given = ("copy", "rows.jsonl")
    with pytest.raises(
        ValueError, match=r"copy/config\.yaml.*reward would run .*: pass trust_code="
    ):
        nemorl.evaluate(*given, device="cpu")
    nemorl.evaluate(*given, device="cpu", reward="exact_match")
    assert not Path("marker").exists()
    nemorl.evaluate(*given, device="cpu", trust_code=True)
    assert Path("marker").exists()
    config = nemorl.load_config(GRPOConfig, "mine.yaml", trust_code=True)
    assert config.loss.scale == 2.0


def test_the_key_is_the_user_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, key = {"reward": "./f.py:fn"}, tmp_path / "nemorl" / "key"
    seal = seal_of(code)
    assert seal and key == key_file() and {*key.parent.iterdir()} == {key, key.with_name(".lock")}
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    assert seal_of(code) == seal != seal_of({"reward": "./f.py:other"})
    key.chmod(0o644)
    with pytest.warns(
        match="can't be sealed.* that only you can read: remove it; set XDG_STATE_HO"
    ):
        assert seal_of(code) is None
    key.chmod(0o600)
    key.rename(tmp_path / "real")
    key.symlink_to(tmp_path / "real")
    with pytest.warns(match="can't be sealed"):
        assert seal_of(code) is None
    assert (tmp_path / "real").read_bytes() and key.is_symlink()


def test_without_a_key_there_is_no_trust(home: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    Path("no_folder").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "no_folder"))
    with pytest.warns(match="can't be sealed, so a resume has to name it, or needs --trust-code"):
        assert seal_of({"reward": "./f.py:fn"}) is None
    assert main(EVAL.split()) == 2
    assert "(its seal can't be checked: " in capsys.readouterr().err
