"""Conversations of several turns, and why some failed, on the page."""

import re

import pytest

import nemorl
from nemorl.rollout.environments.classes import TurnResult
from nemorl.runtime.watch.report import Gathered, failures, render
from tests.runtime.runs import addition_rows, grpo_config, start
from tests.runtime.watch.report.pages import Page


class Guess:
    """Asks three times; a judge is lost where the sum is 0."""

    def reset(self, answer: str) -> str:
        self.answer, self.turn = answer, 0
        return "guess"

    def step(self, response: str) -> TurnResult:
        self.turn += 1
        if self.answer == "0" and self.turn == 2:
            raise KeyError("lost")
        return TurnResult(observation="no+", reward=self.turn / 2, done=self.turn == 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Gathered:
    folder = tmp_path_factory.mktemp("runs") / "guesses"
    config = grpo_config(
        folder,
        steps=2,
        run={"val_period": 2, "samples_per_step": 100},
        data=nemorl.DataConfig(max_total_sequence_length=48, shuffle=False),
    )
    start(config, validation=addition_rows(8), reward=Guess)
    return Gathered(folder)


def test_a_conversation_comes_to_the_page_turn_by_turn(run):
    samples = Page(render(run)).data["runs"][0]["steps"]["1"]
    judged = [sample for sample in samples if "failure" not in sample]
    assert len(judged) == 5 * 4 and len(samples) == 21
    for sample in judged:
        assert [turn["reward"] for turn in sample["turns"]] == [0.5, 1.0, 1.5]
        assert sample["turns"][1]["given"] == "no+" and "trained" not in sample
        given = 0
        for turn in sample["turns"]:
            begin, end = turn["tokens"]
            said = re.sub("<.*?>", "", "".join(sample["tokens"][begin:end]))
            assert said == turn["response"]
            for name in ("logprobs", "gaps", "advantages"):
                assert all(value is not None for value in sample[name][begin:end])
                assert not any(sample[name][given:begin]), "nothing was measured of what is given"
            given = end
        sizes = [end - begin for begin, end in (turn["tokens"] for turn in sample["turns"])]
        assert sample["chips"]["tokens"] == str(sum(sizes)), "what was given is not counted"


def test_why_conversations_failed(run):
    page = Page(render(run))
    (row,) = failures(run)
    counts = [line.get("failed/KeyError", 0) for line in run.metrics]
    assert sum(counts) == row["count"] >= 5 and row["said"] == "KeyError: 'lost'"
    table = page.text.split("Why conversations failed")[1].split("Data")[0]
    assert f"KeyError{row['count']:.0f}1 to 2KeyError: 'lost'" in table
    assert "#failures" in {link["href"] for link in page.all("a")}
    (failed,) = [s for s in page.data["runs"][0]["steps"]["1"] if "failure" in s]
    assert failed["failure"] == row["said"] and "reward" not in failed
