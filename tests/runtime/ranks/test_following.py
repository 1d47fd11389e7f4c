"""What torchrun's processes other than rank 0 do on the command line and in Python: they serve, and
say nothing.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import nemorl
from nemorl.runtime.cli import main as cli
from nemorl.runtime.ranks import following, make
from nemorl.runtime.ranks.following import FollowedRunFailed
from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.run.result import TrainResult
from tests.runtime.runs import sft_config
from tests.tiny_models import tiny_model, tiny_tokenizer

NEEDED = ["sft", "--model.path", "model", "--data.train", "rows.jsonl"]


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """This process is rank 1 of 2; what it was asked to serve."""
    served: list[tuple] = []
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(following, "FAREWELL_S", 0.0)
    monkeypatch.setattr(
        make,
        "serve_as_follower",
        lambda *args, **options: served.append((args, options)) or farewell[0],
    )
    farewell[0] = RESULT
    return served


RESULT = TrainResult({"loss": 1.0}, [], RunDirectory(Path("runs/sft")), None, None)
farewell: list[TrainResult | None] = [RESULT]


def test_a_follower_touches_nothing_and_says_nothing(follower, tmp_path: Path, capsys):
    assert cli.main([*NEEDED, "--runtime.timeout-s", "7"]) == 0
    assert follower == [(("dtensor", 7.0), {"device": None})]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_in_python_it_gets_what_the_run_returned(follower, tmp_path: Path):
    assert nemorl.run(sft_config(tmp_path / "run")) is RESULT
    assert nemorl.train("model", "rows.jsonl", algorithm="sft") is RESULT
    with pytest.raises(
        ValueError,
        match=(
            "model must be a folder or a hub name, from which each of torchrun's processes loads"
            " its own part"
        ),
    ):
        nemorl.train(tiny_model(), "rows.jsonl", algorithm="sft", tokenizer=tiny_tokenizer())


def test_a_run_that_failed_on_rank_zero_ends_it_without_a_word(follower, capsys):
    farewell[0] = None
    with pytest.raises(FollowedRunFailed) as caught:
        nemorl.train("model", "rows.jsonl", algorithm="sft")
    assert caught.value.code == 1
    assert cli.main(NEEDED) == 1
    assert capsys.readouterr() == ("", "")


def test_rank_zero_speaks_first_of_what_all_are_told(follower, monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(following.time, "sleep", waited.append)
    assert cli.main([*NEEDED, "--no-such-flag"]) == 2
    assert capsys.readouterr() == ("", "")
    assert cli.main([*NEEDED, "--parallel.tp", "3"]) == 2
    assert (
        "parallel must divide the 2 devices" in capsys.readouterr().err
    )  # said only if rank 0 has not failed meanwhile
    assert waited == [following.FAREWELL_S] * 2


def test_other_commands_are_rank_zeros(follower, capsys):
    assert cli.main(["eval", "--model", "nowhere", "--data", "nothing.jsonl"]) == 0
    assert capsys.readouterr() == ("", "")


def test_what_it_is_told_can_be_sent():
    result = replace(RESULT, tokenizer=tiny_tokenizer())
    assert pickle.loads(pickle.dumps(result)).metrics == RESULT.metrics


def test_rank_zero_is_no_follower(follower, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert not following.follows()
    monkeypatch.delenv("RANK")
    assert not following.follows()


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (
            [
                "warning: one\n",
                "nemorl sft: \x1b[1;31merror:\x1b[0m lr must be positive\nand a note\n",
            ],
            "nemorl sft: lr must be positive\nand a note",
        ),
        (
            [f"line {number}\n" for number in range(20)],
            "\n".join(f"line {number}" for number in range(8, 20)),
        ),
    ],
    ids=["an error of ours", "others"],
)
def test_torchruns_report_is_told_the_last_words(said, kept, monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit), following.errors_for_torchrun():
        for part in said:
            print(part, end="", file=sys.stderr)
        sys.exit(2)
    assert capsys.readouterr().err == "".join(said)
    assert ProcessFailure(0, 1, 2, str(tmp_path / "error.json")).message["message"] == kept


def test_torchruns_report_has_the_traceback_of_what_nobody_caught(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError), following.errors_for_torchrun():
        1 / 0  # noqa: B018
    assert (
        "ZeroDivisionError"
        in ProcessFailure(0, 1, 1, str(tmp_path / "error.json")).message["extraInfo"][
            "py_callstack"
        ]
    )


def test_no_report_of_a_program_that_ends_well(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit), following.errors_for_torchrun():
        print("warning: only that", file=sys.stderr)
        sys.exit(0)
    assert list(tmp_path.iterdir()) == []
