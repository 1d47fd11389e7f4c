"""What `nemorl.run` refuses before it starts, what it loads by name, and export."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import nemorl
from nemorl.runtime.run import devices
from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch.callbacks import Callback
from tests.runtime.runs import (
    addition_rows,
    chat_rows,
    digits,
    grpo_config,
    numbers,
    of_phase,
    resumed,
    rows_file,
    saved_model,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    """A model folder and a file of rows."""
    rows = rows_file(tmp_path / "rows.jsonl", addition_rows())
    return {"model": str(saved_model(tmp_path / "model")), "rows": rows}


def by_name(config, saved: dict[str, str]):
    data = replace(config.data, train=saved["rows"], validation=saved["rows"])
    return replace(config, model=nemorl.ModelConfig(path=saved["model"]), data=data)


@pytest.mark.parametrize("make", [grpo_config, sft_config])
def test_by_name_equals_by_object(make, saved, tmp_path: Path):
    config = replace(make(tmp_path / "a", steps=2), reward="contains_answer")
    named = nemorl.run(by_name(config, saved))
    given = start(
        replace(config, run=replace(config.run, dir=str(tmp_path / "b"))),
        validation=addition_rows(),
        reward="contains_answer",
    )
    assert list(map(numbers, named.history)) == list(map(numbers, given.history))


def test_export_replaces_nothing_but_an_export(saved, tmp_path: Path):
    nemorl.run(by_name(grpo_config(tmp_path / "run", steps=1), saved))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for output in (mine, tmp_path / "run", saved["model"]):
        with pytest.raises(ValueError, match="output must be a new folder or an earlier export"):
            nemorl.export(run=str(tmp_path / "run"), output=str(output))
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "run" / "checkpoints" / "step_1").exists()
    for _ in range(2):  # an earlier export may be replaced
        nemorl.export(run=str(tmp_path / "run"), output=str(tmp_path / "out"))


def test_an_export_keeps_what_the_model_knew(tmp_path: Path):
    from transformers import AutoTokenizer, GenerationConfig

    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=[1, 5], temperature=0.6, do_sample=True)
    config = grpo_config(
        tmp_path / "run",
        steps=1,
        run={"export": True},
        model=nemorl.ModelConfig(chat_template=template),
        reward="contains_answer",
    )
    nemorl.run(config, model=model, tokenizer=tiny_tokenizer(), train=chat_rows())
    found = GenerationConfig.from_pretrained(tmp_path / "run" / "hf")
    assert (found.eos_token_id, found.temperature) == ([1, 5], 0.6)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "hf").chat_template == template


def test_settings_that_changed_over_a_resume_are_said(saved, tmp_path: Path):
    config = by_name(grpo_config(tmp_path / "run", steps=1), saved)
    nemorl.run(config)
    changed = resumed(
        config, max_num_steps=2, reward="contains_answer", kl=nemorl.KLConfig(coef=0.5)
    )
    with pytest.warns(UserWarning) as caught:
        nemorl.run(changed)
    told = [str(w.message) for w in caught if "changed settings" in str(w.message)]
    assert sorted(text.split(": ")[1] for text in told) == [
        "kl.coef is 0.5, was 0.0",
        "reward is 'contains_answer', was 'exact_match'",
    ]


def test_a_run_to_resume_must_be_there(tmp_path: Path):
    """Unless resume is auto."""
    message = r"must be the folder of a run to resume, but there is none in .*run: check the path"
    with pytest.raises(ValueError, match=message):
        start(sft_config(tmp_path / "run", steps=1, run={"resume": True}))
    assert not (tmp_path / "run").exists()
    for steps in (1, 2):
        config = sft_config(tmp_path / "run", steps=steps, run={"resume": "auto"})
        assert len(of_phase(start(config), "train")) == steps


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_without_a_checkpoint_is_not_overwritten_by_a_resume(tmp_path: Path, resume):
    config = sft_config(tmp_path / "run", steps=1)
    start(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"run\.resume needs a checkpoint, but .* without one, wh"):
        start(replace(config, run=replace(config.run, resume=resume)))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics != ""


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path: Path):
    """As a job that Slurm starts again does."""

    class Ends(Callback):
        def on_step_end(self, trainer, step, metrics) -> None:
            if step == 2:
                raise ZeroDivisionError

    config = sft_config(tmp_path / "run", steps=3, run={"resume": "auto"})
    straight = start(sft_config(tmp_path / "straight", steps=3))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            start(config, callbacks=[Ends()])
        shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
        with pytest.raises(ValueError, match=r"run\.resume needs a checkpoint"):
            start(resumed(config))
    with pytest.warns(UserWarning, match="ended before its first checkpoint: it begins again"):
        again = start(config)
    assert list(map(numbers, again.history)) == list(map(numbers, straight.history))


def told_of_lengths(run) -> tuple[list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    names = ("generation.max_new_tokens", "data.max_total_sequence_length")
    told = [str(w.message) for w in caught if str(w.message).startswith(names)]
    return told, result.paths.config.read_text()


@pytest.mark.parametrize(("positions", "longest"), [(32, 2048), (256, 32)])
def test_answers_of_a_length_that_was_not_given_leave_room_for_the_prompt(
    positions: int, longest: int, tmp_path: Path
):
    config = grpo_config(
        tmp_path,
        steps=1,
        generation=nemorl.GenerationConfig(),
        data=nemorl.DataConfig(max_total_sequence_length=longest),
    )
    told, text = told_of_lengths(lambda: start(config, max_position_embeddings=positions))
    assert len(told) == (positions < longest)
    assert "max_new_tokens: 16\n" in text and "max_total_sequence_length: 32\n" in text
    assert max(line["response_length"] for line in RunDirectory(tmp_path).read_metrics()) <= 16
    again = resumed(config, max_num_steps=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*changed settings")
        start(again, max_position_embeddings=positions)


def test_a_length_that_was_given_stays_or_is_refused(tmp_path: Path):
    given = nemorl.GenerationConfig(max_new_tokens=20)
    config = grpo_config(tmp_path / "a", steps=1, generation=given)
    told, text = told_of_lengths(lambda: start(config))
    assert told == [] and "max_new_tokens: 20\n" in text
    config = grpo_config(tmp_path / "b", generation=given, data=nemorl.DataConfig())
    with (
        pytest.warns(UserWarning, match="is lowered from 2048 to 16"),
        pytest.raises(ValueError, match=r"generation\.max_new_tokens must be below"),
    ):
        start(config, max_position_embeddings=16)


def test_a_resume_elsewhere_keeps_the_precision_or_says_that_it_changed(
    saved, tmp_path: Path, monkeypatch
):
    """The first machine is as one with a GPU, which trains in bfloat16."""
    config = by_name(sft_config(tmp_path / "run", steps=1), saved)
    monkeypatch.setattr(devices, "computes_on_accelerator", lambda *_, **__: True)
    first = nemorl.run(config)
    monkeypatch.undo()
    kept = nemorl.load_config(nemorl.SFTConfig, first.paths.config)
    assert kept.parallel.param_dtype == "bfloat16"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the run continues with changed settings")
        nemorl.run(resumed(kept, max_num_steps=2))
    changed = "parallel.param_dtype is 'float32', was 'bfloat16'"
    with pytest.warns(UserWarning, match=changed):
        nemorl.run(resumed(config, max_num_steps=3))


def test_what_is_given_in_python_is_told_by_the_config(saved, tmp_path: Path):
    config = grpo_config(tmp_path / "run", steps=1, model=nemorl.ModelConfig(path=saved["model"]))
    nemorl.run(config, train=Path(saved["rows"]), reward=[digits, "contains_answer"])
    kept = nemorl.load_config(nemorl.GRPOConfig, tmp_path / "run" / "config.yaml")
    assert kept.data.train == saved["rows"]
    assert kept.reward == "given in Python (digits, contains_answer)"
    message = r"reward must be given again, .* given in Python \(digits, contains_answer\): pass"
    with pytest.raises(ValueError, match=message):
        nemorl.run(resumed(kept, max_num_steps=2))
    again = resumed(config, max_num_steps=2)
    nemorl.run(again, train=saved["rows"], reward=[digits, "contains_answer"])


def test_short_sequences_leave_room_for_the_comparison_of_engines(tmp_path: Path):
    """The token that trainer and generator compare must fit a microbatch, too."""
    config = grpo_config(
        tmp_path,
        steps=1,
        data=nemorl.DataConfig(max_total_sequence_length=12),
        trainer=nemorl.TrainerConfig(device="cpu", micro_batch_tokens=12),
    )
    assert len(of_phase(start(config), "train")) == 1


def test_changed_rows_are_noticed_by_a_resume(saved, tmp_path: Path):
    """By content, not by name."""
    file = tmp_path / "rows.jsonl"
    lines = Path(saved["rows"]).read_text().splitlines()
    file.write_text("\n".join(lines))
    config = by_name(sft_config(tmp_path / "run", steps=1), {**saved, "rows": str(file)})
    nemorl.run(config)
    again = resumed(config, max_num_steps=2)
    message = (
        r"data\.train and data\.validation must be the rows that the run began with, but"
        r" '.*rows\.jsonl': "
    )
    changed_rows = "\n".join([*lines[:3], lines[0], *lines[4:]])
    file.write_text(changed_rows)
    remedy = r"other rows: restore them, or add --run\.accept-change"
    with pytest.raises(ValueError, match=message + remedy):
        nemorl.run(again)
    file.write_text("\n".join(lines))
    for changed, cause in (
        (
            {"prompt_template": "{prompt}?"},
            r"\.jsonl': other rows \(data\.prompt_template is '\{prompt\}\?', was None\): restore",
        ),
        (
            {"validation": None, "held_out": 0.2},
            r"\.jsonl': 32 rows instead of 40.* data\.held_out is 0\.2, was 0\.0",
        ),
    ):
        with pytest.raises(ValueError, match=cause):
            nemorl.run(replace(again, data=replace(again.data, **changed)))
    file.write_text(changed_rows)
    accepting = replace(again, run=replace(again.run, accept_changed_data=True))
    with pytest.warns(UserWarning, match="the run continues with changed rows: .* other rows"):
        assert len(of_phase(nemorl.run(accepting), "train")) == 2
    assert "accept_changed_data: false" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("command", [nemorl.train, nemorl.evaluate])
def test_a_limit_without_effect_is_refused_before_a_model_is_looked_for(command, tmp_path: Path):
    given = {"run": {"dir": str(tmp_path / "r")}} if command is nemorl.train else {}
    with pytest.raises(ValueError, match=r"rollout\.max_turns has no effect on a reward.*it is 3"):
        command("no/model", [{"prompt": "1+1=", "answer": "2"}], rollout__max_turns=3, **given)
    assert not (tmp_path / "r").exists()
