"""The presets: what they say is what the config then holds."""

from pathlib import Path

import pytest

from nemorl.runtime.config.base import GRPOConfig
from nemorl.runtime.config.policy import (
    CISPOLoss,
    ClippedLoss,
    GroupAdvantage,
    GSPOLoss,
    OverlongConfig,
    ReinforceLoss,
    ReinforcePlusPlusAdvantage,
)
from nemorl.runtime.config.presets import DESCRIPTIONS, PRESETS, preset
from nemorl.runtime.config.tree import load_config
from nemorl.runtime.start.registry import get_algorithm

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_config(name: str) -> None:
    assert isinstance(preset(name), GRPOConfig)
    assert preset(name, {"max_num_steps": 3}).max_num_steps == 3
    assert DESCRIPTIONS[name]


def test_they_differ_from_each_other() -> None:
    made = [preset(name) for name in PRESETS]
    assert (
        all(made[i] != made[j] for i in range(len(made)) for j in range(i))
        and GRPOConfig() not in made
    )
    assert list(PRESETS) == list(DESCRIPTIONS)


def test_what_they_hold() -> None:
    assert (preset("grpo").advantage, preset("grpo").kl.coef, preset("grpo").reduction) == (
        GroupAdvantage(),
        0.04,
        "sequence_mean",
    )
    assert (preset("dr_grpo").advantage, preset("dr_grpo").reduction) == (
        GroupAdvantage(scale="none"),
        "constant",
    )
    assert preset("rloo").advantage == GroupAdvantage(baseline="leave_one_out", scale="none")
    assert (preset("rloo").loss, preset("rloo").reduction) == (ReinforceLoss(), "constant")
    assert preset("nemo_grpo").advantage == GroupAdvantage(
        baseline="leave_one_out", scale="leave_one_out_std"
    )
    assert (preset("nemo_grpo").reduction, preset("nemo_grpo").kl.coef) == ("token_mean", 0.01)
    dapo = preset("dapo")
    assert (dapo.loss, dapo.reduction, dapo.dynamic_sampling, dapo.kl.coef) == (
        ClippedLoss(clip_high=0.28),
        "token_mean",
        True,
        0.0,
    )
    assert dapo.overlong == OverlongConfig(buffer=0.2, filter=True)
    assert (preset("gspo").loss, preset("gspo").reduction) == (
        GSPOLoss(clip_low=3e-4, clip_high=4e-4),
        "sequence_mean",
    )
    assert (preset("cispo").loss, preset("cispo").reduction) == (
        CISPOLoss(clip_high=4.0),
        "token_mean",
    )
    assert preset("reinforce_plus_plus").advantage == ReinforcePlusPlusAdvantage(kl_coef=0.01)
    assert preset("reinforce_plus_plus").needs_reference


def test_overrides_win_and_may_choose_another_variant() -> None:
    assert preset("dapo", {"loss": {"clip_low": 0.1}}).loss == ClippedLoss(
        clip_low=0.1, clip_high=0.28
    )
    assert preset("dapo", {"loss": "gspo"}).loss == GSPOLoss()


def test_unknown_preset() -> None:
    with pytest.raises(
        ValueError, match=r"unknown preset 'dapoo'; did you mean dapo\? Valid names: grpo, dr_grpo"
    ):
        preset("dapoo")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_files_of_configs(path: Path) -> None:
    """Each loads, and its first line is the command that uses it."""
    _, prog, command, *rest = path.read_text().splitlines()[0].split()
    assert prog == "nemorl" and f"configs/{path.name}" in rest
    base = (
        preset(rest[rest.index("--preset") + 1])
        if "--preset" in rest
        else get_algorithm(command).config()
    )
    assert load_config(type(base), path, base=base).run.dir != "runs/run"


def test_there_are_files_in_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"sft", "grpo", "dapo", "tiny_cpu"}
