"""The table of names that people try, entry by entry: as flag, in YAML and in Python."""

import re
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl import DPOConfig, GRPOConfig, SFTConfig
from nemorl.checks import closest
from nemorl.runtime.cli import main as cli
from nemorl.runtime.cli.api import ARGUMENTS, make_config
from nemorl.runtime.config.flags import flag_of
from nemorl.runtime.config.spellings import LIBRARIES, PAGES, Absent, page_of, settings_in
from nemorl.runtime.config.tree import from_dict, leaves

DOCS = Path(__file__).parents[3] / "docs"
ALGORITHMS: dict[str, Any] = {"grpo": GRPOConfig, "sft": SFTConfig, "dpo": DPOConfig}
ENTRIES = [
    (library, theirs, ours)
    for library, table in LIBRARIES.items()
    for theirs, ours in table.items()
]


def anchors(page: str) -> set[str]:
    """The headings of a page, as GitHub links them."""
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def has_it(ours: str | Absent) -> tuple[str, str]:
    """An algorithm that has the setting, and the setting; of what is not there "grpo" and ""."""
    if isinstance(ours, Absent):
        return "grpo", ""
    for key in settings_in(ours):
        for name, config in ALGORITHMS.items():
            if key in leaves(config):
                return name, key
    raise AssertionError(ours)


def says(message: str, theirs: str, ours: str | Absent, write: str, key: str) -> None:
    assert theirs in message
    if isinstance(ours, Absent):
        assert f"nemorl has no {theirs}: {ours.today} (docs/{ours.page})" in message
    else:
        assert f"{theirs} is {ours}; write {write} (docs/{page_of(key)})" in message


def test_there_are_enough():
    assert len(ENTRIES) > 300 and {len(table) > 30 for table in LIBRARIES.values()} == {True}
    assert all(page.partition("#")[2] in anchors(page.partition("#")[0]) for page in PAGES.values())


@pytest.mark.parametrize(("library", "theirs", "ours"), ENTRIES, ids=lambda value: str(value)[:50])
def test_entry(library: str, theirs: str, ours: str | Absent, capsys):
    """It is no setting of ours, its page exists, and each way to write it is refused with what it
    stands for.
    """
    algorithm, key = has_it(ours)
    config = ALGORITHMS[algorithm]
    assert theirs not in leaves(config)
    page, _, anchor = (ours.page if isinstance(ours, Absent) else page_of(key)).partition("#")
    assert not anchor or anchor in anchors(page)
    name = key.removesuffix(".name") if key in ("loss.name", "advantage.name") else key
    assert cli.main([algorithm, flag_of(theirs), "1"]) == 2
    says(capsys.readouterr().err, theirs, ours, flag_of(name), key)
    tree: dict[str, Any] = {}
    *sections, last = theirs.split(".")
    inner = tree
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = {} if theirs in ("kl", "lora") else 1
    if theirs in ("kl", "lora"):  # sections of ours
        tree = {theirs: 1}
    with pytest.raises(ValueError) as refused:
        from_dict(config, tree)
    says(str(refused.value), theirs, ours, key, key)
    if theirs.isidentifier() and theirs not in ("kl", "lora", "algorithm"):
        with pytest.raises(ValueError) as refused:
            make_config(algorithm, **{theirs: 1})
        says(
            str(refused.value), theirs, ours, f"{ARGUMENTS.get(key, key.replace('.', '__'))}=", key
        )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("grpo --kl 0.1", "kl is kl.coef; write --kl.coef ("),
        ("grpo --kl.coef none", "kl.coef must be a valid number, but it is 'none': write 0"),
        ("grpo --kl.coef null", "kl.coef must be a valid number, but it is 'null': write 0"),
        ("grpo --batch-size 64", "write --train-global-batch-size (docs/sft.md#the-batch)"),
        ("grpo --generation.batch-size 64", "write --train-global-batch-size"),
        ("grpo --group-size 8", "write --num-generations-per-prompt ("),
        (
            "grpo --epochs 3",
            "epochs is num_epochs (grpo counts rollout batches: max_num_steps); write",
        ),
        ("sft --epochs 3", "write --num-epochs ("),
        ("grpo --tools f", "tools are the methods of a class, rollout.environment (in Python: "),
        ("grpo --multi-turn 3", "multi_turn is rollout.max_turns; write --rollout.max-turns ("),
        ("grpo --num-epochs 3", "max_num_steps: grpo counts rollout batches; write --max-num-s"),
        ("sft --num-generations 4", ": sft has no num_generations_per_prompt, as TRL's num_ge"),
        ("sft --beta 0.1", ": sft has no kl.coef, as TRL's beta is called here (docs/"),
        ("sft --kl.coef 0.1", "unknown setting --kl.coef: sft has no kl.coef, as kl is called"),
        ("grpo --lora.r 8", "lora is lora.rank; write --lora.rank"),
        ("grpo actor_rollout_ref.actor.mine=3", "nemorl has no actor_rollout_ref: "),
        ("grpo --optimizer.lrr 3", "unknown setting --optimizer.lrr; did you mean --optimizer.lr?"),
        (
            "grpo --learning-rat 3",
            "did you mean learning_rate? TRL's learning_rate is optimizer.lr",
        ),
        ("grpo --presett dapo", "unknown setting --presett; did you mean --preset?"),
        ("export --out x", "unknown setting --out; did you mean --output?"),
        (
            "export --output-dir x",
            "TRL's output_dir is run.dir (export, report: output); write --o",
        ),
        ("report --out-dir x", "write --output (docs/sft.md#validation)"),
        ("plan --num-gpus 8", "write --gpus (docs/parallelism.md#which-plan)"),
        ("plan --dp 8", "dp is parallel.dp_shard; write --parallel.dp-shard"),
        ("plan --lora-rank 8", "lora_rank is lora.rank; write --lora.rank"),
        ("plan --backend mine", "write --trainer.backend or --generation.backend"),
        ("eval --run.seed 3", "unknown setting --run.seed: write --seed"),
        ("grpo --num-gpus 8", "write --parallel.dp-shard"),
        ("eval --dataset x", "dataset is data.train (eval: data.validation); write --data.valid"),
        ("eval --train-dataset x", "unknown setting --train-dataset: eval has no data.train, as T"),
        ("eval --num-samples 4", "write --n (docs/data.md#validation)"),
        ("generate --num-generations 4", "write --n ("),
        ("eval --devices cuda", "unknown setting --devices; did you mean --device?"),
        ("grpo --prompts-per-step 4", "write --num-prompts-per-step ("),
        ("grpo --generations-per-prompt 4", "write --num-generations-per-prompt ("),
        ("grpo --checkpoint-every 4", "write --run.save-period ("),
        ("grpo --no-kl", "no_kl is kl.coef 0; write --kl.coef ("),
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
        ("eval_dataset", r"write validation= \("),
        ("model_path", r"model_path is model\.path; write model= \("),
        ("num_samples", r"write n= \("),
        ("reward_funcs", r"reward \(in Python: reward_fn\); write reward_fn= \("),
        ("epochs", r"setting epochs of eval: eval has no num_epochs, as epochs is called here \("),
    ],
)
def test_what_evaluate_calls_otherwise(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        nemorl.evaluate("m", "d.jsonl", **{name: 1})


@pytest.mark.parametrize(
    ("word", "other", "one"),
    [
        *(("lrr", "lr", True), ("rl", "lr", True), ("kl", "lr", False), ("lora", "lr", False)),
        *(("top", "tp", False), ("top", "stop", False), ("stp", "step", True)),
        *(("warm", "warn", False), ("beta2", "beta1", False), ("beta", "beta1", False)),
        *(("batch_size", "max_batch_size", False), ("max_new_token", "max_new_tokens", True)),
        *(("block_sise", "block_size", True), ("beta_1a", "beta_2a", False)),
        *(("maxNewTokens", "max_new_tokens", True), ("temprature", "temperature", True)),
        *(("kl.coeff", "kl.coef", True), ("off_policy.coef", "kl.coef", False)),
    ],
)
def test_what_is_a_slip(word: str, other: str, one: bool):
    assert bool(closest(word, [other])) is one
