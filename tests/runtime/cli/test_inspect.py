"""`nemorl data inspect`: what is trained on is shown to the letter, with and without colour."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import nemorl
from nemorl.data.batch import Example
from nemorl.runtime.cli import main as cli
from nemorl.runtime.cli.commands import inspect_data, kind_of, print_inspection, shown
from nemorl.runtime.cli.settings import InspectConfig
from tests.data.tokenizers_small import character_tokenizer
from tests.tiny_models import tiny_tokenizer

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b\nc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]


def printed(given: list, *, colour: bool = False, width: int = 120, **options) -> str:
    config = InspectConfig(**options)
    file = io.StringIO()
    system: Any = "truecolor" if colour else None
    console = Console(
        file=file, width=width, force_terminal=colour, color_system=system, highlight=False
    )
    print_inspection(
        config, inspect_data(config, tokenizer=character_tokenizer(), train=given), console
    )
    return file.getvalue()


def test_trained_tokens_stand_between_brackets_to_the_letter():
    text = printed([{"messages": TALK}])
    wanted = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b\nc<|im_end|>⟧\n"
    wanted += "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n⟦e<|im_end|>⟧\n"
    assert wanted.replace("\n", "↵\n") in text
    assert "row 1: 48 tokens, 6 trained on" in text
    assert "1 demonstrations; trained on: ⟦like this⟧" in text


def test_colour_stands_for_the_brackets():
    text = printed([{"messages": TALK}], colour=True)
    assert "⟦" not in text
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text, re.S)
    assert [part.replace("↵\n", "\n") for part in green if part not in ("↵",)][:1] == ["like this"]
    assert "".join(green[1:]).replace("↵", "").replace("\n", "") == "bc<|im_end|>e<|im_end|>"


def test_long_rows_are_not_wrapped():
    assert "⟦" + "b" * 500 + "<|im_end|>⟧" in printed(
        [{"prompt": "a", "response": "b" * 500}], width=40
    )


def test_escape_sequences_of_the_data_do_not_reach_the_terminal():
    example = Example(input_ids=[0, 1], loss_mask=[False, True], response_mask=[False, True])

    class Hostile:
        def decode(self, ids, **options):
            return "".join(("\x1b[2J", "x")[i] for i in ids)

    assert shown(example, Hostile(), styled=False).plain == "␛[2J⟦x⟧"


@pytest.mark.parametrize(
    ("row", "kind", "wanted"),
    [
        (
            {"prompt": "a", "answer": "b"},
            "prompt",
            ["1 prompts; prompts are not trained on", "row 1: 1 tokens\na\n"],
        ),
        ({"prompt": "a", "response": "b"}, "sft", ["a⟦b<|im_end|>⟧"]),
        ({"messages": TALK[:1]}, "prompt", ["assistant↵\n"]),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "pairs",
            ["row 1, chosen: 3 tokens", "a⟦b<|im_end|>⟧", "row 1, rejected", "a⟦c<|im_end|>⟧"],
        ),
        (
            {"prompt": "a", "response": "b", "label": False},
            "labels",
            ["row 1, not wanted", "a⟦b<|im_end|>⟧"],
        ),
    ],
)
def test_every_kind_is_recognised_and_shown(row, kind, wanted):
    text = printed([row])
    assert all(part in text for part in wanted)
    assert (
        kind_of(inspect_data(InspectConfig(), tokenizer=character_tokenizer(), train=[row]).rows[0])
        == kind
    )


def test_the_kind_can_be_chosen():
    row = {"prompt": "a", "response": "b"}
    assert "⟦" not in printed([row], kind="prompt")
    with pytest.raises(ValueError, match="row 1: a preference must have chosen and rejected"):
        printed([row], kind="pairs")


def test_rows_lengths_and_limit():
    rows = [{"prompt": "a" * n, "response": "b"} for n in range(1, 21)]
    text = printed(rows, rows=2, data=nemorl.DataConfig(max_total_sequence_length=20))
    assert "row 2:" in text and "row 3:" not in text
    table = next(line for line in text.splitlines() if "demonstrations" in line and "│" in line)
    assert re.findall(r"[\d.]+", table) == ["20", "250", "12.5", "12.5", "21", "22", "20"]
    assert "demonstrations: 2 over the limit of 20 tokens" in text
    assert "rows padded to the longest are 57% full, with --trainer.sequence-packing 9" in text
    bars = [line.split() for line in text.splitlines() if "█" in line]
    assert sum(int(parts[3]) for parts in bars) == 20


def test_the_command(tmp_path: Path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": "1+1=", "gold": "2"}) + "\n" for _ in range(3))
    )
    columns = ["--data.prompt-column", "question", "--data.response-column", "gold"]
    flags = ["--data.train", str(tmp_path / "rows.jsonl"), *columns, "--rows", "1"]
    assert cli.main(["data", "inspect", "--model.path", str(tmp_path / "model"), *flags]) == 0
    out = capsys.readouterr().out
    said = f"{tmp_path / 'rows.jsonl'}, line 1: 6 tokens, 2 trained on\n1+1=⟦2<eos>⟧"
    assert said in out and "line 2" not in out
