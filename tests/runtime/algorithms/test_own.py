"""Losses, advantages and rewards of the user's: by module, by file, by a registered name."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nemorl
from nemorl.losses import policy
from nemorl.losses.types import LossOutput
from nemorl.rollout.answers import REWARDS
from nemorl.rollout.environments import make_environment
from nemorl.runtime.cli import main as cli
from nemorl.runtime.config.tree import dump_yaml, from_dict, load_config, to_dict
from nemorl.runtime.run.launch import environment_of
from tests.examples import forgetting_own
from tests.runtime.runs import grpo_config, numbers, start
from tests.tiny_models import tiny_model

FILE = '''
import torch

def plain(logprobs, prev, advantages, weights, *, scale: float = 1.0, on=False):
    """Plain REINFORCE, scaled.

    More about it.
    """
    return -scale * (weights * advantages * logprobs).where(weights != 0, 0.0).sum()

def shifted(rewards, group_id, lengths, *, shift: float):
    return rewards - shift + 0 * lengths

def by_token(rewards, group_id, *, loss_mask):
    return rewards[:, None].expand_as(loss_mask).clone()

def close(response, answer, *, tolerance: float = 0.0) -> float:
    return float(response.strip().isdigit() and abs(int(response) - int(answer)) <= tolerance)

def one_reward(response): return 1.0
def no_loss(x, y): return 0
def strange(a, b, c, d, *, table: torch.Tensor = None): return 0
def reserved(a, b, c, d, *, takes=1): return 0
def mutable(a, b, c, d, *, sizes=[]): return 0
def rows(a, b, c, d): return d.sum(-1)
def detached(a, b, c, d): return (a.detach() * d).sum()
def three(rewards, group_id): return rewards[:3]
A_NUMBER = 3
'''


@pytest.fixture(autouse=True)
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file with functions in the working folder; what is registered is gone afterwards."""
    rewards = dict(REWARDS)
    (tmp_path / "my_pieces.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_pieces", raising=False)
    with forgetting_own():
        yield
    REWARDS.clear()
    REWARDS.update(rewards)


def config(folder: Path, **settings: Any) -> nemorl.GRPOConfig:
    return from_dict(nemorl.GRPOConfig, to_dict(grpo_config(folder, steps=3)) | settings)


def history(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    return [numbers(line) for line in start(config(folder, **settings)).history]


OFF_POLICY = {"num_updates_per_batch": 2, "off_policy": {"mode": "truncate", "max": 1.5}}


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        ({"loss": "nemorl.losses.policy:clipped"}, {"loss": "clipped"}),
        (
            {"loss": {"name": "nemorl.losses.policy:gspo", "clip_low": 0.1}},
            {"loss": {"name": "gspo", "clip_low": 0.1}},
        ),
        ({"advantage": "nemorl.losses.advantages:rloo"}, {"advantage": {"name": "group"} | {
            "baseline": "leave_one_out", "scale": "none"}}),
    ],
)  # fmt: skip
def test_our_own_functions_by_their_place_are_the_names(tmp_path: Path, own: Any, ours: Any):
    """Also with the importance weights and segments that a function names."""
    by_place = history(tmp_path / "a", **own, **OFF_POLICY)
    assert by_place == history(tmp_path / "b", **ours, **OFF_POLICY)


def test_a_file_is_as_a_module(tmp_path: Path):
    one = {"reduction": "constant", "advantage": {"name": "group", "scale": "none"}}
    mine = history(tmp_path / "a", loss={"name": "./my_pieces.py:plain", "scale": 1.0}, **one)
    theirs = history(tmp_path / "b", loss="reinforce", **one)
    assert [line["reward"] for line in mine] == [line["reward"] for line in theirs]
    norms = [[line["grad_norm"] for line in lines] for lines in (mine, theirs)]
    assert norms[0] == pytest.approx(norms[1])


def test_advantages_per_response_and_per_token(tmp_path: Path):
    given = {"name": "my_pieces:shifted", "shift": 0.0}
    per_response = history(tmp_path / "a", advantage=given)
    assert per_response == history(tmp_path / "b", advantage="my_pieces:by_token")
    none = {"name": "group", "baseline": "none", "scale": "none"}
    assert per_response == history(tmp_path / "c", advantage=none)


def test_settings_are_checked_written_and_read(tmp_path: Path, capsys):
    loss = {"name": "my_pieces:plain", "scale": 2, "on": True}
    mine = config(tmp_path / "run", loss=loss, advantage={"name": "my_pieces:shifted", "shift": 1})
    Path("mine.yaml").write_text(dump_yaml(mine))
    assert load_config(nemorl.GRPOConfig, "mine.yaml", trust_code=True) == mine
    assert (mine.loss.name, mine.loss.scale, mine.loss.on) == ("my_pieces:plain", 2.0, True)
    flags = "--config mine.yaml --trust-code --model.path m --loss.scale 0.5 --loss.no-on --shift 3"
    assert cli.main(["grpo", *flags.split(), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "  # Plain" not in printed
    assert "# Plain REINFORCE, scaled.\nloss:\n  # One of clipped, " in printed
    assert "  scale: 0.5\n" in printed and '  "on": false\n' in printed and "shift: 3" in printed
    assert cli.main(["grpo", "--loss", "my_pieces:plain", "--help", "loss"]) == 0
    shown = capsys.readouterr().out
    assert "Plain REINFORCE, scaled." in shown and "--loss.scale FLOAT" in shown
    assert "More about it" not in shown


TAKES = r"must be a function fn\(token_logprobs, prev_logprobs, advantages, loss_weights, \*, your"
REFUSED = [
    ({"loss": "my_pieces:no_loss"}, rf"^loss {TAKES}.* is fn\(x, y\)"),
    ({"loss": "my_pieces:A_NUMBER"}, rf"^loss {TAKES}.* is 3: name a function"),
    ({"loss": "my_pieces:strange"}, r"^loss\.table must be of a type that a setting can have"),
    ({"loss": "my_pieces:reserved"}, r"^loss\.takes can't be a setting, because name, data, "),
    ({"loss": "my_pieces:mutable"}, r"^mutable default <class 'list'> for field sizes"),
    (
        {"loss": "my_pieces:nothing"},
        r"^loss must name a function .* has no 'nothing': it has plain, ",
    ),
    ({"loss": "./other.py:plain"}, r"^loss must name a module or a \.py file, but .* 'other' in"),
    ({"loss": {"name": "my_pieces:plain", "scal": 2}}, r"^unknown key loss\.scal; did you mean"),
    ({"advantage": "my_pieces:shifted"}, r"^advantage\.shift must be given"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_does_not_fit_is_refused(settings: Any, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


def test_a_file_with_the_name_of_a_module(tmp_path: Path):
    Path("json.py").write_text(FILE)
    with pytest.raises(ValueError, match=r"whose name no other module has, but \./json\.py has"):
        config(tmp_path, loss="./json.py:plain")


@pytest.mark.parametrize(
    ("setting", "text", "said"),
    [
        ("loss", "import my_other as fn\n", "my_other.py, line 2: "),
        ("reward", "def fn(:\n", "broken.py, line 1: "),
        (
            "loss",
            "import sys as fn\nfn.exit(3)\n",
            "must not end the run, but it called sys.exit(3)",
        ),
    ],
)
def test_a_file_that_can_not_be_imported_is_one_line(
    setting: str, text: str, said: str, tmp_path: Path, capsys
):
    Path("broken.py").write_text(text)
    Path("my_other.py").write_text("\n  x = (\n")
    Path("rows.jsonl").write_text('{"prompt": "1"}\n')
    tiny_model().save_pretrained("model")
    capsys.readouterr()
    flags = f"--model.path model --data.train rows.jsonl --{setting} ./broken.py:fn --run.dir run"
    assert cli.main(["grpo", *flags.split()]) in (1, 2)
    shown = capsys.readouterr().err
    assert shown.startswith(f"nemorl grpo: error: {setting} ") and shown.count("\n") == 1
    assert said in shown


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "my_pieces:rows"}, r"a loss must return a scalar .* a tensor of shape \(24,\)"),
        ({"loss": "my_pieces:detached"}, r"a loss must have a gradient .* remove \.detach\(\)"),
        ({"advantage": "my_pieces:three"}, r"advantage my_pieces:three must return a tensor of sh"),
    ],
)
def test_a_result_of_another_shape(settings: Any, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        start(config(tmp_path / "run", **settings))


def test_registered_by_name(tmp_path: Path):
    @nemorl.register_loss("mine")
    def mine(token_logprobs, prev_logprobs, advantages, loss_weights, *, clip: float = 0.2):
        output = policy.clipped(
            token_logprobs, prev_logprobs, advantages, loss_weights, clip_low=clip, clip_high=clip
        )
        return LossOutput(output.loss, {"ratio_mean": output.metrics["ratio_mean"]})

    @nemorl.register_advantage("centered")
    def centered(rewards, group_id):
        return rewards - rewards.mean()

    @nemorl.register_reward("close")
    def close(response, answer, *, tolerance: float = 0.0):
        return float(response[:1] == answer[:1]) + tolerance

    found = history(
        tmp_path / "a",
        loss={"name": "mine", "clip": 0.1},
        advantage="centered",
        num_updates_per_batch=2,
    )
    ours = {"name": "group", "baseline": "batch_mean", "scale": "none"}
    clipped = {"name": "clipped", "clip_low": 0.1, "clip_high": 0.1}
    expected = history(tmp_path / "b", loss=clipped, advantage=ours, num_updates_per_batch=2)
    assert [x["loss"] for x in found] == pytest.approx([x["loss"] for x in expected], abs=1e-7)
    assert all("ratio_mean" in line and "clip_fraction_low" not in line for line in found)
    environment = environment_of(
        config(tmp_path, reward="close", reward_kwargs={"tolerance": 0.5}), None
    )
    log = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert environment.step([log], [{"answer": "2"}]).rewards == [1.5]
    with pytest.raises(ValueError, match="loss must have a name of its own, but it is 'clipped'"):
        nemorl.register_loss("clipped")(mine)


def test_parameters_of_rewards_are_settings(tmp_path: Path):
    log = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "3"}]
    two = ["./my_pieces.py:close", "my_pieces:one_reward"]
    for tolerance, expected in ((0.0, 1.0), (1.0, 2.0)):
        environment = make_environment(two, settings={"tolerance": tolerance})
        assert environment.step([log], [{"answer": "2"}]).rewards == [expected]
    one = make_environment("my_pieces:close", settings={"tolerance": 1, "answer": "9"})
    assert one.step([log], [{}]).rewards == [0.0]  # instead of a column
    with pytest.raises(
        ValueError, match=r"reward_kwargs must name .* no 'tolerence'; did you mean"
    ):
        make_environment("my_pieces:close", settings={"tolerence": 1.0})
