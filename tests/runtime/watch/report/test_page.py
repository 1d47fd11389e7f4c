import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest

import nemorl
from nemorl.runtime.cli import main as cli
from nemorl.runtime.store.directory import RunDirectory, RunRecord
from nemorl.runtime.watch import report as module
from nemorl.runtime.watch.report import Gathered, curves_of, grouped, render, sample_data
from tests.runtime.runs import addition_rows, grpo_config, start
from tests.runtime.watch.report.pages import EVIL, Page


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("runs") / "sums"
    start(
        grpo_config(folder, steps=4, run={"val_period": 2, "save_period": 2}),
        validation=addition_rows(8),
    )
    return RunDirectory.open(folder)


def page_of(run) -> Page:
    return Page(render(Gathered(run.path)))


def test_a_run_on_a_page(run):
    page = page_of(run)
    for words in (
        "sums", "finished", "4 of 4", "Reward", "num_generations_per_prompt", "default 8",
        "checkpoint of step 4 written", "torch", "only what differs",
    ):  # fmt: skip
        assert words in page.text, words
    links = {link["href"].removeprefix("#") for link in page.all("a")}
    assert links == {*["curves", "samples", "receipts", "data", "settings", "log", "environment"]}
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) and links <= set(ids)
    looked_for = set(re.findall(r'\bid\("([\w-]+)"\)', page.script))
    assert looked_for <= set(ids), "every id that the script looks for is there"


def test_the_page_needs_nothing_but_itself(run):
    text = render(Gathered(run.path))
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "base"} & {name for name, _ in page.elements}
    assert not page.handlers and not any("src" in attributes for _, attributes in page.elements)
    own = text.split('<script type="application/json"')[0].replace("http://www.w3.org", "")
    assert "http" not in own.replace("http-equiv", "")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_no_script_but_ours_may_run(run):
    page = page_of(run)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    for dangerous in ("innerHTML", "insertAdjacentHTML", "eval("):
        assert dangerous not in page.script


def test_samples_token_by_token(run):
    (samples,) = page_of(run).data["runs"]
    assert list(samples["steps"]) == ["1", "2", "3", "4"] and samples["most"] > 0
    for sample in samples["steps"]["4"]:
        chips = sample["chips"]
        for name in ("tokens", "logprobs", "gaps", "advantages"):
            assert str(len(sample[name])) == chips["tokens"]
        assert max(map(abs, sample["gaps"])) < 1e-4 and "widest gap" not in chips
        assert {"prompt", "response", "reward", "chips"} <= set(sample)
        assert chips["answer"].isdigit() and "advantage" in chips and "response" not in chips


def test_hostile_text_stays_text(run, tmp_path):
    """Samples, metrics, settings, log, record, the folder's name."""
    directory = RunDirectory.create(tmp_path / EVIL.replace("/", "⁄").replace("\x00", "")[:80], "")
    record = RunRecord.begin(directory, algorithm="grpo")
    evil = replace(record, algorithm=EVIL, status="failed", error=EVIL, run_id=EVIL)
    evil.write(directory)
    directory.append_metrics(1, {EVIL: 1.0, "reward/" + EVIL: 2.0, "loss": 1.0})
    directory.append_metrics(2, {EVIL: 1.0, "loss": 2.0})
    texts = {"prompt": EVIL, "response": EVIL + "\ud800", "chosen": [{"role": EVIL}]}
    values = {"reward": 1.0, "rewards": {EVIL: 1.0}, "columns": {EVIL: EVIL}, EVIL: EVIL}
    directory.append_samples(1, [texts | values])
    line = dict.fromkeys(("run_id", "level", "time", "step", "message", "traceback"), EVIL)
    directory.log.write_text(json.dumps(line) + "\n")
    settings = {"environment": {EVIL: EVIL}, "model": {"path": EVIL}, EVIL: {EVIL: EVIL}}
    directory.config.write_text(json.dumps(settings))
    numbers = {EVIL: EVIL, "count": 3, "histogram": [[1, 2]]}
    directory.data.write_text(json.dumps({EVIL: numbers}))
    page = Page(nemorl.write_report(directory.path).read_text(encoding="utf-8"))
    assert len(page.all("script")) == 2 and not page.all("img") and not page.handlers
    assert page.text.count('<script>alert("x")</script>') >= 10
    assert page.data["runs"][0]["steps"]["1"][0]["prompt"] == EVIL


def test_a_run_in_progress_a_failed_and_an_interrupted_one(directory):
    record = RunRecord.begin(directory, algorithm="sft")
    page = page_of(directory)
    assert "A snapshot of a run in progress" in page.text
    assert "No step has been finished yet." in page.text
    assert "#samples" not in str(page.all("a"))
    directory.append_metrics(7, {"loss": float("nan")})
    failed = replace(record, status="failed", error="ValueError: no <more>", total_steps=70)
    failed.write(directory)
    page = page_of(directory)
    assert "The run failed at step 7. ValueError: no <more>" in page.text and "7 of 70" in page.text
    replace(record, status="interrupted").write(directory)
    assert "--run.resume" in page_of(directory).text


def test_preferences_side_by_side(directory):
    pair = {"chosen": "2", "rejected": "3", "margin": 0.123456, "extra": None}
    directory.append_samples(1, [{"prompt": [{"role": "user", "content": "1+1="}], **pair}])
    (sample,) = sample_data(Gathered(directory.path))["steps"][1]
    texts = {"prompt": "user: 1+1=", "chosen": "2", "rejected": "3"}
    assert sample == texts | {"chips": {"margin": "0.1235"}}


METRICS = [
    {
        **{"step": step, "phase": "train", "reward": step / 10, "reward/brief": 0.1 * step},
        **{"lr": 1e-5, "my_own": step, "ratio_max": 1.0, "flag": True, "nothing": None},
        **{"seconds": 2.0, "seconds_generate": 1.5, "seconds_train": 0.4},
        "generation/replica_0/busy": step,
    }
    for step in range(1, 8)
] + [{"step": 4, "phase": "validation", "reward": 0.5, "accuracy": 0.25}]


def groups_of(run: RunDirectory, metrics: list[dict]) -> dict[str, dict]:
    found = Gathered(run.path)
    found.metrics = metrics
    return {group["name"]: group for group in grouped(curves_of(found))}


def test_every_number_has_its_place(run):
    groups = groups_of(run, METRICS)
    titles = {name: [curve["title"] for curve in group["drawn"]] for name, group in groups.items()}
    assert titles == {
        "Learning": ["Reward", "Accuracy", "brief"],
        "Updates": [],
        "Engines": ["replica 0/busy"],
        "Speed and resources": [],
        "Other": ["my own"],
    }
    shares = groups["Speed and resources"]["shares"]
    assert shares == pytest.approx({"generate": 0.75, "train": 0.2, "other": 0.05})
    assert groups["Learning"]["drawn"][0]["data"]["courses"] == [
        ["training", [*range(1, 8)], [step / 10 for step in range(1, 8)]],
        ["validation", [4], [0.5]],
    ]


def copy_of(run: RunDirectory, folder, **settings) -> RunDirectory:
    """The same run elsewhere, with other settings."""
    shutil.copytree(run.path, folder)
    text = (folder / "config.yaml").read_text()
    for name, value in settings.items():
        text = re.sub(rf"(?m)^( *{name}): .*", rf"\1: {value}", text)
    (folder / "config.yaml").write_text(text)
    return RunDirectory.open(folder)


@pytest.mark.slow
def test_runs_side_by_side(run, tmp_path, capsys):
    other = copy_of(run, tmp_path / "others" / "slower", lr="1.0e-6", dir="elsewhere")
    with (other.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 1.0, "phase": "train", "reward": 0.25, "my_own": 1.0}\n')
    mine = copy_of(run, tmp_path / "sums")
    assert cli.main(["report", str(mine.path), str(other.path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"sums +finished +4 ", said) and re.search(r"slower +finished +5 ", said)
    page = Page((tmp_path / "comparison.html").read_text())
    assert {"2 runs", "sums", "slower", "4 of 4", "Settings that differ"} <= {
        text.strip() for _, text in page.texts
    }
    rows = [row.split() for row in page.text.split("Settings that differ")[1].splitlines()]
    assert ["optimizer.lr0.011e-06"] in rows, "and not run.dir"
    assert [part["name"] for part in page.data["runs"]] == ["sums", "slower"]
    reward = page.data["curves"][0]["courses"]
    assert [course[0] for course in reward] == ["sums", "sums", "slower", "slower"]
    assert reward[2][2] == [1, 2, 3, 4, 5], "each run has its own steps"


@pytest.mark.parametrize("names", [[], ["sums", "../runs/sums"], [str(i) for i in range(7)]])
def test_none_twice_the_same_or_too_many_runs_are_refused(tmp_path, names):
    with pytest.raises(ValueError, match="runs must name 1 to 6 runs, each once, but it is"):
        nemorl.write_report([tmp_path / "runs" / name for name in names])


@pytest.mark.parametrize("ending", ["finished", "Ctrl-C"])
def test_a_watched_run_refreshes_until_its_end(directory, monkeypatch, ending):
    record = RunRecord.begin(directory, algorithm="sft")
    pages: list[Page] = []

    def sleep(seconds: float) -> None:
        assert seconds >= 5
        pages.append(Page((directory.path / "report.html").read_text()))
        directory.append_metrics(len(pages), {"loss": 1.0 / len(pages)})
        if len(pages) == 3 and ending == "Ctrl-C":
            raise KeyboardInterrupt
        if len(pages) == 3:
            replace(record, status="finished").write(directory)

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert cli.main(["report", str(directory.path), "--watch"]) == 0
    assert [page.data["refresh"] for page in pages] == [5.0, 5.0, 5.0]
    steps = [page.data["curves"][0]["courses"][0][1] for page in pages[1:]]
    assert steps == [[1], [1, 2]] and "This page follows it." in pages[-1].text
    last = Page((directory.path / "report.html").read_text())
    assert last.data["refresh"] is None
    assert last.data["curves"][0]["courses"][0][1] == [1, 2, 3]


def test_the_command(run, tmp_path, capsys):
    assert cli.main(["report", str(run.path)]) == 0
    assert "report.html" in capsys.readouterr().out
    (run.path / "report.html").unlink()
    page = tmp_path / "deep" / "page.html"
    assert cli.main(["report", str(run.path), "--output", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
