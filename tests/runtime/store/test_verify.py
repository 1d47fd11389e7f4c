"""`nemorl verify`: a run's files say which receipts hold; each one that is changed is found."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nemorl
from nemorl.losses import policy
from nemorl.losses.masks import token_mean_weights
from nemorl.rollout.collect import to_token_batch
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.cli.main import main
from nemorl.runtime.run.receipts import ReceiptError
from nemorl.runtime.start import live
from nemorl.runtime.start.registry import GENERATION_BACKENDS, TRAINING_BACKENDS
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.store.record import RunRecord
from nemorl.runtime.store.verify import Receipt, verify_run
from nemorl.runtime.watch.report.gather import Gathered
from nemorl.runtime.watch.report.page import render
from nemorl.runtime.watch.report.receipts import depth_profile, depths
from tests.runtime.algorithms.test_receipts import Exchanging
from tests.runtime.runs import addition_rows, digits, grpo_config, opened, start
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a filter."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    generation = nemorl.GenerationConfig(max_new_tokens=6, top_k=12)
    start(grpo_config(folder, steps=3, generation=generation, run={"save_period": 2}))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def of(run: Path) -> dict[str, Receipt]:
    return {each.name: each for each in verify_run(run)}


def rewrite(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the metrics of each step."""
    file = run / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_whole_run_holds(run: Path, capsys: pytest.CaptureFixture[str]):
    found = of(run)
    assert {name for name, each in found.items() if each.holds} == {
        *("tokens", "support", "mismatch", "prompts", "staleness", "checkpoints")
    }
    assert not [each for each in found.values() if each.holds is False]
    assert found["prompts"].found == "18 taken: 18 trained on, 0 open"
    assert found["staleness"].found == "up to 0 steps, in step 1 (at most 0)"
    assert found["weights"].found.startswith("nothing to prove: no engine reports weights")
    assert found["tokens"].found.endswith(" tokens in 3 steps are the sampled ones")
    assert found["checkpoints"].found.startswith("2 whole, ")
    assert "from token 4 on" in found["mismatch"].found
    assert main(["verify", str(run)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" holds ") == 6 and "does not hold" not in printed
    assert main(["verify", str(run), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Receipt(**line) for line in lines] == [*found.values()]


def step(number: int, **changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(line: dict[str, Any]) -> dict[str, Any]:
        return (
            {**line, **({k.replace("__", "/"): v for k, v in changed.items()})}
            if (line["step"] == number)
            else line
        )

    return change


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "other tokens": (
        "tokens",
        step(2, receipts__tokens=0, receipts__tokens_unproved=96),
        "in step 2 others were trained on than sampled",
    ),
    "no receipt": (
        "tokens",
        step(3, receipts__tokens=None, receipts__tokens_unproved=None),
        "step 3 trained without a receipt",
    ),
    "support": (
        "support",
        step(2, receipts__support_ratio=0.896, receipts__support_error=0.01),
        "mean of π_trainer/π_sampler 0.8960 in step 2",
    ),
    "mismatch": ("mismatch", step(1, token_mult_prob_error=1.2), "factor 1.2 on average in step 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metrics_that_do_not_hold(name: str, run: Path, capsys: pytest.CaptureFixture[str]):
    receipt, change, said = WRONG[name]
    rewrite(run, change)
    found = of(run)
    assert [each.name for each in found.values() if each.holds is False] == [receipt]
    assert found[receipt].found.startswith(said)
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr()
    assert "does not hold" in printed.out
    assert printed.err == f"{receipt} of {run} does not hold\n"
    assert "<b>does not hold</b>" in render(Gathered(run))


@pytest.mark.parametrize(
    ("error", "holds"), [(0.0, False), (0.02, False), (0.03, True)], ids=["sure", "2 %", "3 %"]
)
def test_support_is_judged_beyond_four_standard_errors(error: float, holds: bool, run: Path):
    rewrite(run, step(2, receipts__support_ratio=0.896, receipts__support_error=error))
    assert of(run)["support"].holds is holds


def engines(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Metrics of a step that vLLM sampled for; the first of a run has no update."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        proved = {"generation/weights/proved": 9.0, "generation/weights/unproved": 0.0}
        own = proved if line["step"] > 1 else {}
        return step(3, **changed)({**line, "generation/replica_0/restarts": 0.0, **own})

    return change


def test_each_update_of_engines_needs_a_receipt(run: Path):
    rewrite(run, engines(generation__weights__unproved=2.0))
    found = of(run)["weights"]
    assert found.holds
    assert found.found == (
        "2 updates, 9 tensors or more in each; up to 2 that engines store in another form can't"
        " be read"
    )
    rewrite(run, engines(generation__weights__proved=None))
    assert of(run)["weights"] == Receipt(
        "weights", False, "step 3 sampled after an update without a receipt"
    )


def test_what_no_step_counts_needs_none(run: Path):
    """The update before a validation, and before the first step of a process."""
    rewrite(run, engines(generation__weights__proved=None))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "time": 5, "phase": "validation", "reward": 1}) + "\n")
    assert of(run)["weights"].holds


def test_a_resumed_process_begins_with_an_update_that_no_step_counts(run: Path):
    rewrite(run, engines(generation__weights__proved=None))
    directory = RunDirectory(run)
    record = RunRecord.read(directory)
    assert record is not None
    times = [line["time"] for line in directory.read_metrics()]
    rewrite(run, step(3, time=times[-1] + 10))
    replace(record, sessions=(*record.sessions, times[-1] + 5)).write(directory)
    assert of(run)["weights"].holds


def test_engines_without_any_receipt(run: Path):
    rewrite(run, lambda line: {**line, "generation/replica_0/restarts": 0.0})
    found = of(run)["weights"]
    assert found.holds is False
    assert found.found == "step 2 sampled after an update without a receipt (2 in all)"


@pytest.mark.parametrize(("sent", "holds"), [(0.0, True), (1.0, False), (2.0, False)])
def test_only_a_step_that_was_given_weights_needs_a_receipt(sent: float, holds: bool, run: Path):
    """A loop of one's own may train in some steps only, and log no number of updates."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        found = engines(generation__weights__proved=None)(line)
        found["generation/weights/updates"] = sent if line["step"] == 3 else 1.0
        return {name: value for name, value in found.items() if name != "num_updates"}

    rewrite(run, lambda line: {**change(line), "generation/weights/proved": 9.0})
    assert of(run)["weights"].found == "3 updates, 9 tensors or more in each"
    rewrite(run, lambda line: change({**line, "generation/weights/proved": 9.0}))
    found = of(run)["weights"]
    assert found.holds is holds
    if not holds:
        assert found.found == "step 3 sampled after an update without a receipt"


def test_an_update_in_the_first_step_that_counts_it_needs_a_receipt(run: Path):
    rewrite(run, engines(generation__weights__updates=1.0))
    rewrite(run, step(1, generation__weights__updates=1.0))
    found = of(run)["weights"].found
    assert found == "step 1 sampled after an update without a receipt"


class Receiving(TorchGenerationBackend):
    """The embedded engine, which says what an engine of its own does of weights it is sent."""

    proved: float | None = None

    async def update_weights(self, source: Any, **options: Any) -> int:
        self.proved = 9.0
        return await super().update_weights(source, **options)

    def metrics(self) -> dict[str, float]:
        proved, self.proved = self.proved, None
        told = {} if proved is None else {"weights/proved": proved, "weights/unproved": 0.0}
        return {**super().metrics(), **told, "replica_0/restarts": 0.0}


@pytest.mark.parametrize("period", [1, 2, 9])
def test_a_loop_that_trains_in_some_steps(
    period: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(GENERATION_BACKENDS, "receiving", Receiving)
    monkeypatch.setattr(live, "shares_weights", lambda launch, engine: False)
    generation = nemorl.GenerationConfig(max_new_tokens=4, backend="receiving")
    with nemorl.open_run(
        grpo_config(tmp_path, generation=generation),
        model=tiny_model(scale=2.0),
        tokenizer=tiny_tokenizer(),
        train=addition_rows(),
        reward=digits,
    ) as opened:
        prompts = opened.prompts()
        for each in opened.steps(5):
            found = each.sample(prompts.next(2), n=2)
            each.log({"mine": 1.0})
            if each.number % period == 0:
                batch = to_token_batch(found)
                weights = token_mean_weights(batch.loss_mask)
                batch = replace(batch, advantages=torch.ones_like(weights), loss_weights=weights)
                loss = nemorl.policy_loss(policy.clipped, clip_low=0.2, clip_high=0.2)
                each.log(opened.trainer.train_step(batch, loss))
    lines = RunDirectory(tmp_path).read_metrics()
    sent = [line["generation/weights/updates"] for line in lines]
    assert sent == [float(n > 1 and (n - 1) % period == 0) for n in range(1, 6)]
    weights = of(tmp_path)["weights"]
    assert weights.holds is not False, weights.found
    if period < 9:
        rewrite(tmp_path, lambda line: {**line, "generation/weights/proved": None})
        assert of(tmp_path)["weights"].holds is False


GROUPS = [
    {"step": 1, "trained": [0, 1], "dropped": {}, "open": [2, 3]},
    {"step": 2, "trained": [3], "dropped": {"uninformative": [2]}, "open": [4]},
]


def write_groups(run: Path, *lines: dict[str, Any], torn: str = "") -> None:
    """With the metrics of their steps."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "groups.jsonl").write_text(text + torn)
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[: len(lines)]))
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def test_every_prompt_is_trained_on_dropped_or_open(run: Path):
    write_groups(run, *GROUPS, torn='{"step": 3, "trai')
    found = of(run)["prompts"]
    assert found.holds
    assert found.found == "5 taken: 3 trained on, 1 dropped as uninformative, 1 open"
    write_groups(run, torn='{"step": 1, "trai')
    assert of(run)["prompts"] == Receipt("prompts", None, "not recorded")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"trained": [3, 0]}, "group 0 is in it 2 times"),
        ({"dropped": {"a": [2], "b": [2]}}, "group 2 is in it 2 times"),
        ({"open": [4, 4]}, "group 4 is in it 2 times"),
        ({"open": [3, 4]}, "group 3 is in it 2 times"),
        ({"dropped": {}}, "group 2 is lost"),
        ({"open": [6]}, "group 4 is lost (2 in all)"),
    ],
)
def test_a_prompt_that_is_lost_or_doubled_is_found(changed: dict[str, Any], said: str, run: Path):
    write_groups(run, GROUPS[0], {**GROUPS[1], **changed})
    assert of(run)["prompts"] == Receipt("prompts", False, said)


def without_lines(file: Path, *steps: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] not in steps))


@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (2, 3), (1, 2, 3)])
def test_a_step_without_its_groups_is_found(gone: tuple[int, ...], run: Path):
    without_lines(run / "groups.jsonl", *gone)
    more = f" ({len(gone)} in all)" if len(gone) > 1 else ""
    said = f"groups.jsonl lacks step {gone[0]}{more}"
    assert of(run)["prompts"] == Receipt("prompts", False, said)
    (run / "groups.jsonl").unlink()
    assert of(run)["prompts"].holds is False


def test_groups_of_a_step_that_did_not_end_do_not_count(run: Path):
    """As after a full disk between groups.jsonl and the checkpoint."""
    without_lines(run / "metrics.jsonl", 3)
    shutil.rmtree(run / "checkpoints" / "step_3")
    assert of(run)["prompts"].found == "12 taken: 12 trained on, 0 open"


def test_metrics_with_a_step_twice_are_no_receipt(run: Path):
    file = run / "metrics.jsonl"
    first, second, third = file.read_text().splitlines(keepends=True)
    file.write_text(first + second + second + third)
    assert of(run)["tokens"] == Receipt("tokens", False, "metrics.jsonl has step 2 more than once")


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_step_without_metrics_is_not_recorded(gone: int, run: Path):
    """A full disk for metrics.jsonl is a warning only."""
    without_lines(run / "metrics.jsonl", gone)
    found = of(run)
    said = f"not recorded: metrics.jsonl lacks step {gone}"
    assert found["tokens"] == Receipt("tokens", None, said)
    assert found["prompts"].found == "18 taken: 18 trained on, 0 open"


def test_a_loop_that_samples_by_itself_records_its_prompts(tmp_path: Path):
    with opened(grpo_config(tmp_path)) as run:
        prompts = run.prompts()
        for each in run.steps(3):
            each.log({}, samples=each.sample(prompts.next(2), n=2))
    assert of(tmp_path)["prompts"].found == "6 taken: 6 trained on, 0 open"
    whole = (tmp_path / "groups.jsonl").read_text()
    for gone, lost in ((1, 0), (2, 2)):
        without_lines(tmp_path / "groups.jsonl", gone)
        said = f"group {lost} is lost (2 in all)"
        assert of(tmp_path)["prompts"] == Receipt("prompts", False, said)
        (tmp_path / "groups.jsonl").write_text(whole)


def test_files_that_both_lack_their_beginning_are_no_older_version(run: Path):
    for name in ("groups.jsonl", "metrics.jsonl"):
        without_lines(run / name, 1)
    assert of(run)["prompts"] == Receipt("prompts", False, "group 0 is lost (6 in all)")


def test_steps_of_a_version_without_receipts_need_none(run: Path):
    def older(line: dict[str, Any]) -> dict[str, Any]:
        new = ("receipts/", "staleness/") if line["step"] == 1 else ("-",)
        return {name: value for name, value in line.items() if not name.startswith(new)}

    rewrite(run, older)
    without_lines(run / "groups.jsonl", 1)
    found = of(run)
    assert found["tokens"].holds and found["tokens"].found.endswith("ones, from step 2 on")
    assert found["prompts"] == Receipt("prompts", True, "12 taken: 12 trained on, 0 open")


def test_a_sampler_without_finite_logprobs_does_not_agree(run: Path):
    rewrite(run, step(2, token_mult_prob_error=0.0, generation_nonfinite_fraction=1.0))
    said = "in step 2 no logprob of the sampler is finite"
    assert of(run)["mismatch"] == Receipt("mismatch", False, said)


@pytest.mark.parametrize(("worst", "holds"), [(2, True), (3, False)])
@pytest.mark.parametrize("recorded", [True, False])
def test_no_token_is_staler_than_allowed(worst: int, holds: bool, recorded: bool, run: Path):
    """Runs that recorded no limit are compared with their settings."""
    rewrite(run, step(3, staleness__max=worst))
    assert of(run)["staleness"].holds is False
    limit = 2.0 if recorded else None
    rewrite(run, lambda line: {**line, "staleness/limit": limit})
    text = (run / "config.yaml").read_text()
    setting = f"max_staleness: {9 if recorded else 2}"
    (run / "config.yaml").write_text(text.replace("max_staleness: 0", setting))
    found = of(run)["staleness"]
    assert found == Receipt("staleness", holds, f"up to {worst} steps, in step 3 (at most 2)")


def test_a_resume_may_change_how_stale_tokens_may_be(run: Path):
    """The older steps keep their limit, and a step beyond its own is named before others."""
    rewrite(run, step(1, staleness__max=3.0, staleness__limit=3.0))
    rewrite(run, step(3, staleness__max=1.0, staleness__limit=1.0))
    found = of(run)["staleness"]
    assert found == Receipt("staleness", True, "up to 3 steps, in step 1 (at most 3)")
    rewrite(run, step(3, staleness__max=2.0))
    found = of(run)["staleness"]
    assert found == Receipt("staleness", False, "up to 2 steps, in step 3 (at most 1)")


def test_a_loop_of_ones_own_counts_no_updates(run: Path):
    def without(line: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in line.items() if name != "num_updates"}

    rewrite(run, without)
    assert of(run)["tokens"].holds
    rewrite(run, WRONG["other tokens"][1])
    assert of(run)["tokens"].holds is False


def test_a_damaged_checkpoint_is_found(run: Path):
    file = next((run / "checkpoints" / "step_2").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = of(run)["checkpoints"]
    assert found.holds is False and found.found.startswith("step 2: ") and file.name in found.found
    (run / "checkpoints" / "step_3" / "manifest.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step_2")
    assert of(run)["checkpoints"].found.startswith("step 3: ")
    shutil.rmtree(run / "checkpoints")
    assert of(run)["checkpoints"] == Receipt("checkpoints", None, "there is none")


def test_a_run_that_a_receipt_stopped_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(TRAINING_BACKENDS, "exchanging", Exchanging)
    trainer = nemorl.TrainerConfig(device="cpu", backend="exchanging")
    with pytest.raises(ReceiptError):
        start(grpo_config(tmp_path / "run", steps=2, trainer=trainer))
    found = of(tmp_path / "run")["tokens"]
    assert found.holds is False
    assert found.found.startswith("it stopped the run: ") and "step 1: the receipt tokens" in (
        found.found
    )


def test_files_that_are_missing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("run.json", "metrics.jsonl", "groups.jsonl", "checkpoints"):
        shutil.move(run / name, tmp_path / name)
    assert {each.found for each in verify_run(run)} == {
        "not recorded",
        "there is none",
        "nothing to prove: no engine reports weights of its own",
    }
    assert main(["verify", str(run)]) == 0
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "run must be the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["much", None, [1], True, {}])
def test_values_of_wrong_types_are_no_receipts(wrong: Any, run: Path):
    rewrite(run, engines())
    rewrite(run, lambda line: {**dict.fromkeys(line, wrong), **{n: line[n] for n in LABELS}})
    found = of(run)
    assert found.pop("weights").holds is False, "engines have sampled"
    assert {each.holds for each in found.values()} == {None, True}
    rewrite(run, lambda line: {**line, "token_mult_prob_error": 1.0, "receipts/support_ratio": 1.0})
    assert of(run)["mismatch"].holds and of(run)["support"].holds


LABELS = ("step", "time", "phase")


def test_the_page_has_the_receipts_and_the_gap_by_depth(run: Path):
    gathered = Gathered(run)
    assert [*depths(gathered.metrics)] == [1, 4]
    assert depth_profile(gathered.metrics).startswith("<svg") and depth_profile([]) == ""
    page = render(gathered)
    section = page[page.index('<section id="receipts">') :].partition("</section>")[0]
    assert section.count("<td>holds</td>") == 5 and "<svg" in section
    assert section.count("<td>–</td>") == 1
