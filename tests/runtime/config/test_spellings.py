"""The table of names that people try, entry by entry: as flag, in YAML and in Python."""

from typing import Any

import pytest

import nemorl
from nemorl.checks import closest
from nemorl.runtime.cli import main as cli
from nemorl.runtime.cli.api import make_config
from nemorl.runtime.cli.commands import COMMANDS
from nemorl.runtime.config.flags import flag_of
from nemorl.runtime.config.spellings import libraries, page_of, settings_in, table
from nemorl.runtime.config.tree import from_dict, leaves
from nemorl.runtime.run.registry import ALGORITHMS

ENTRIES = {name: ours for names in libraries().values() for name, ours in names.items()}
KNOWN = {key for each in (*ALGORITHMS.values(), *COMMANDS.values()) for key in leaves(each.config)}
ORDER = ("grpo", "sft", "dpo", "ppo", "distill")
SECTIONS = ("kl", "lora")  # names of theirs that are sections here


def test_the_table_is_sorted_and_names_settings_that_there_are():
    rows = table()["names"]
    assert all(list(names) == sorted(names) for names in rows.values())
    assert {settings_in(ours)[0] for ours in ENTRIES.values() if settings_in(ours)} <= KNOWN
    assert {*table()["importer"]["settings"], *table()["pages"]} <= KNOWN
    assert sum(map(len, libraries().values())) > 500 and min(map(len, libraries().values())) > 30


@pytest.mark.parametrize("theirs", ENTRIES)
def test_entry(theirs: str, capsys):
    """Each way to write it is refused with what it stands for."""
    ours = next(names[theirs] for names in libraries().values() if theirs in names)
    own = [(n, k) for k in settings_in(ours) for n in ORDER if k in leaves(ALGORITHMS[n].config)]
    algorithm, key = own[0] if own else ("grpo", "")
    config = ALGORITHMS[algorithm].config
    expected = f"{theirs} is {ours}; write " if key else f"{theirs}: {ours.removeprefix('none: ')}"
    page = f"(docs/{page_of(key)})" if key else ""
    assert theirs not in leaves(config)
    assert cli.main([algorithm, flag_of(theirs), "1"]) == 2
    message = capsys.readouterr().err
    assert expected in message and page in message
    tree: Any = 1
    for part in reversed(theirs.split(".")):
        tree = {part: tree}
    with pytest.raises(ValueError) as refused:
        from_dict(config, tree)
    assert expected in str(refused.value)
    if theirs.isidentifier() and theirs not in (*SECTIONS, "algorithm"):
        with pytest.raises(ValueError) as refused:
            make_config(algorithm, **{theirs: 1})
        assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("grpo --epsilon 0.2", "unless epsilon_high is given; write --loss.clip-low and --loss.cl"),
        ("grpo --beta 0.1", "is kl.coef, with kl.gradient importance as in TRL 1.16 (DPO:"),
        ("grpo --kl.coef none", "kl.coef must be a valid number, but it is 'none': write 0"),
        (
            "grpo --batch-size 64",
            "write --train-global-batch-size (docs/configuration.md#nemorl-grpo)",
        ),
        (
            "grpo --epochs 3",
            "epochs is num_epochs (grpo counts rollout batches: max_num_steps); write",
        ),
        ("sft --beta 0.1", ": sft has no kl.coef, as TRL's beta is called here (docs/"),
        ("grpo actor_rollout_ref.actor.mine=3", "nemorl has no actor_rollout_ref: "),
        ("grpo --optimizer.lrr 3", "unknown setting --optimizer.lrr; did you mean --optimizer.lr?"),
        (
            "export --output-dir x",
            "TRL's output_dir is run.dir (export, report: output); write --o",
        ),
        ("grpo --optimzer.lr 3", "--optimzer.lr; did you mean --optimizer.lr?"),
        ("grpo --loss.clip 3", "--loss.clip; did you mean --loss.clip-low or --loss.clip-high?"),
        (
            "grpo --generation.gpu-memory-utilization 0.5",
            """write --generation.engine '{"gpu_memory_utilization": 0.5}' (docs/conf""",
        ),
        ("plan --backend mine", "write --trainer.backend or --generation.backend"),
        ("eval --train-dataset x", "unknown setting --train-dataset: eval has no data.train, as T"),
        *((f"grpo --{word} 3", f"--{word}; --help all") for word in ("zzz", "top", "klr")),
    ],
)
def test_examples(args: str, message: str, capsys):
    assert cli.main(args.split()) == 2
    assert message in capsys.readouterr().err


def test_rewards_in_python():
    with pytest.raises(
        ValueError, match=r"TRL's reward_funcs is reward .*; write reward_fn= \(docs"
    ):
        make_config("grpo", reward_funcs=[len])
    with pytest.raises(ValueError, match=r"reward must be a name here, .* pass it as reward_fn="):
        make_config("grpo", reward=len)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train_data", r"is data\.train \(eval: data\.validation\); write validation= \(docs"),
        ("reward_funcs", r"reward \(in Python: reward_fn\); write reward_fn= \("),
    ],
)
def test_what_evaluate_calls_otherwise(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        nemorl.evaluate("m", "d.jsonl", **{name: 1})


@pytest.mark.parametrize("pair", ["lrr lr", "rl lr", "stp step", "maxNewTokens max_new_tokens"])
def test_a_slip(pair: str):
    assert closest(pair.split()[0], pair.split()[1:])


@pytest.mark.parametrize("pair", ["kl lr", "top stop", "warm warn", "beta2 beta1"])
def test_another_word(pair: str):
    assert not closest(pair.split()[0], pair.split()[1:])
