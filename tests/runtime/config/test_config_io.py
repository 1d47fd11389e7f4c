"""Configs from mappings and YAML: what comes back, and what is refused with which words."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import ruamel.yaml
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemorl import (
    CISPOLoss,
    ClippedLoss,
    DataConfig,
    GenerationConfig,
    GroupAdvantage,
    GRPOConfig,
    GSPOLoss,
    OptimizerConfig,
    ReinforceLoss,
    ReinforcePlusPlusAdvantage,
    RunConfig,
    SFTConfig,
)
from nemorl.runtime.cli.settings import EvalConfig, ExportConfig, GenerateConfig
from nemorl.runtime.config.tree import dump_yaml, from_dict, load_config, to_dict, unused
from nemorl.runtime.config.yaml_io import ConfigError, dump, read

CONFIGS: list[Any] = [
    SFTConfig(),
    GRPOConfig(),
    GRPOConfig(
        loss=GSPOLoss(token_gradient=True), advantage=ReinforcePlusPlusAdvantage(kl_coef=1e-5)
    ),
    GRPOConfig(
        loss=CISPOLoss(clip_low=None),
        generation=GenerationConfig(
            stop_strings=("\n", "1e-5", "null", "ü: #"), stop_token_ids=(3, 4)
        ),
    ),
    GRPOConfig(
        loss=ReinforceLoss(),
        run=RunConfig(dir="1e-5", loggers=("wandb",)),
        optimizer=OptimizerConfig(max_grad_norm=None, eps=1e-12),
    ),
    EvalConfig(data=DataConfig(chat=True), n=3, generation=GenerationConfig(temperature=0.5)),
    GenerateConfig(prompt=("1+1=", "yes", "12:30")),
    ExportConfig(run="runs/a", output="out", step=0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_round_trips(config: Any, tmp_path: Path):
    assert from_dict(type(config), to_dict(config)) == config
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(type(config), path) == config
    plain = json.loads(json.dumps(to_dict(config)))
    for section, name in (key.split(".") for key in unused(type(config))):
        del plain[section][name]
    assert yaml.safe_load(dump_yaml(config)) == plain  # readable by any YAML parser, too
    commented = dump_yaml(config, comments=True)
    assert yaml.safe_load(commented) == plain


def test_comments_explain_each_key():
    lines = dump_yaml(GRPOConfig(loss=GSPOLoss()), comments=True).splitlines()
    about = "  # Decay of the running mean of the gradient."
    assert lines[lines.index("  beta1: 0.9") - 1] == about
    text = " ".join(line.strip("# ") for line in lines)
    assert (
        "loss: One of clipped, gspo, cispo, sapo, gmpo, reinforce, module:function. name: gspo"
        in text
    )
    assert "one step after the end. One of constant, linear, cosine. schedule: constant" in text


def test_empty_is_the_default(tmp_path: Path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\noptimizer:\n  # nothing here either\n")
    assert load_config(GRPOConfig, path) == GRPOConfig() == from_dict(GRPOConfig, {})
    path.write_text("")
    assert load_config(SFTConfig, path) == SFTConfig()


def test_a_default_that_is_not_the_class_default_is_kept():
    config = from_dict(EvalConfig, {"generation": {"max_new_tokens": 5}})
    assert config.generation == GenerationConfig(temperature=0.0, max_new_tokens=5)


def test_unions_by_name():
    assert from_dict(GRPOConfig, {"loss": {"name": "cispo", "clip_high": 1.0}}).loss == CISPOLoss(
        clip_high=1.0
    )
    assert from_dict(GRPOConfig, {"loss": "gspo"}).loss == GSPOLoss()
    assert from_dict(GRPOConfig, {"loss": {"name": "clipped"}}) == GRPOConfig()
    assert from_dict(GRPOConfig, {"loss": {"clip_low": 0.1}}).loss == ClippedLoss(clip_low=0.1)
    assert from_dict(GRPOConfig, {"advantage": {"scale": "none"}}).advantage == GroupAdvantage(
        scale="none"
    )


def test_an_int_is_a_float_and_a_list_a_tuple():
    config = from_dict(
        GRPOConfig,
        {
            "kl": {"coef": 1},
            "generation": {"stop_strings": ["a"], "stop_token_ids": (1, 2)},
            "overlong": {"penalty": 2},
        },
    )
    assert (
        isinstance(config.kl.coef, float)
        and config.generation.stop_strings == ("a",)
        and config.generation.stop_token_ids == (1, 2)
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss": "reinforced"}, r"did you mean reinforce\?"),
    ({"loss": ["gspo"]}, r"loss must be a section"),
    (
        {"max_num_steps": "3"},
        r"max_num_steps must be a valid integer, but it is '3': give it without quotes",
    ),
    ({"optimizer": {"lr": "high"}}, r"optimizer\.lr must be a valid number, but it is 'high'$"),
    ({"dynamic_sampling": 1}, r"dynamic_sampling must be true or false, but it is 1$"),
    (
        {"generation": {"stop_strings": "a"}},
        (
            r"generation\.stop_strings must be a list, but it is 'a':"
            r" write \[a\]"
        ),
    ),
    ({"kl": {"coef": None}}, r"kl\.coef must be a valid number, but it is None: write 0$"),
    (
        {"parallel": {"param_dtype": "bf16"}},
        r"parallel\.param_dtype must be one of float32, bfloat16, .*did you mean bfloat16\?",
    ),
]


@pytest.mark.parametrize("mapping, message", WRONG, ids=lambda value: str(value)[:40])
def test_refused(mapping: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        from_dict(GRPOConfig, mapping)


BOMB = "a0: &a0 [1]\n"
BOMB += "\n".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9))


def test_aliases_and_merges_are_read(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(
        "optimizer: &a {lr: 1e-4, beta1: 0.8}\nother: &b {<<: *a, lr: 1e-3}\nlast: *b\n"
    )
    plain, _ = read(tmp_path / "a.yaml")
    assert plain["last"] == plain["other"] == {"lr": 1e-3, "beta1": 0.8}


def test_a_config_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"/dev/zero: .* more than 10000000 characters"):
        read("/dev/zero")


TRAPS = ["1e5", "~", "\x7f", "a.b", "y", "NO", "null", "12:30", "=", "<<", "---", "{", "2026-01-01"]
TRAPS += [".inf", "0o7", "?", "🙂", "\ufffe", "&a", "*a", "a\nb", "\x85", "\u2028", "\ufeff"]
TRAPS += ["Note: brief", "- a", "# a", "", " "]
SPECIAL = st.sampled_from([*TRAPS, "!!int 3", "a: b", "%YAML 1.1", "\t", "\r\n"])
TEXTS = st.text() | SPECIAL
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
    | st.sampled_from([10**398, -(10**398), -0.0, 5e-324, 1e16, float("1e400")]),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(TEXTS, VALUES))
def test_reading_is_the_inverse_of_writing(tmp_path_factory: Any, tree: dict[str, Any]):
    text = dump(tree)
    path = tmp_path_factory.getbasetemp() / "law.yaml"
    path.write_text(text, encoding="utf-8")
    read_by_others = {
        "PyYAML": yaml.safe_load(text),
        "ruamel.yaml": ruamel.yaml.YAML(typ="safe", pure=True).load(text),
    }
    for reader, found in {"nemorl": read(path)[0], **read_by_others}.items():
        assert repr(found or {}) == repr(tree), reader  # tells -0.0, nan, 1 and True apart


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Path("a"), "b.c must hold text, numbers, .* but it holds PosixPath"),
        ("\udc80", "b.c must hold text, .* surrogates not allowed"),
        ({1: 2}, "keys of b.c.1 must be text, but one is 1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_not_be_read_back_is_not_written(value: Any, reason: str):
    with pytest.raises(ConfigError, match=reason):
        dump({"b": {"c": value}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- " * 100_000, "must not be nested so deep"),
        ("a: 1\n'a': 2", "line 2: .*duplicate key 'a': keep one"),
        ("run: !!python/object:os.system {}", "not valid YAML"),
        ("a: 1\n---\nb: 1\n", "not valid YAML"),
        ("a:\n  b: x\u2028y", r"line 2 has U\+2028"),
        ("? {a: 1}\n: 2", "line 1: .*keys must be strings"),
        ("a: \x00", "control characters are not allowed$"),
        (BOMB, "more than 1000000 values: remove aliases"),
        ("run: &a {dir: *a}", "must not be nested so deep"),
        ("run: {seed: " + "9" * 60_000 + "}", "Exceeds the limit"),
    ],
    ids=lambda value: value[:20],
)
def test_refused_files(text: str, reason: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path / "a.yaml")


def test_a_file_that_is_not_text(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: \xff}")
    with pytest.raises(ConfigError, match="can't read the config file"):
        read(tmp_path / "latin.yaml")


def test_types_of_version_1_2(tmp_path: Path):
    text = "[010, 0o10, 0x1F, 1_000, +1, 1e3, .5, -.INF, yes, off, 1:30, 13e3c19, ~, NULL, True, =]"
    (tmp_path / "a.yaml").write_text(f"a: {text}\n1e-5: null\n")
    expected = [10, 8, 31, 1000, 1, 1000.0, 0.5, -math.inf, "yes", "off", "1:30"]
    expected += ["13e3c19", None, None]
    assert repr(read(tmp_path / "a.yaml")[0]) == repr({"a": [*expected, True, "="], "1e-5": None})
