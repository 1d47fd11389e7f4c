"""The SFT loop and what validation says of it."""

from pathlib import Path

import pytest
import torch

import nemorl
from nemorl.data.datasets import to_examples
from nemorl.parallel.config import BackendConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.runtime.algorithms.sft import validation_loss
from tests.runtime.runs import addition_rows, of_phase, rows_file, sft_config, start
from tests.tiny_models import tiny_model, tiny_tokenizer


def test_it_learns_its_demonstrations(tmp_path: Path):
    """35 different sums: the loss falls on rows that were held out only because they are among
    those trained on; every answer becomes right.
    """
    config = sft_config(tmp_path, steps=180, run={"val_period": 90, "export": True})
    result = start(config, validation=addition_rows(35), scale=1.0)
    validations = of_phase(result, "validation")
    assert [line["step"] for line in validations] == [90, 180]
    assert validations[-1]["loss"] < 0.2
    assert result.metrics["val_accuracy"] > 0.9
    assert result.metrics["loss"] < result.history[0]["loss"] / 5
    assert (tmp_path / "hf" / "model.safetensors").exists()
    rows = rows_file(tmp_path / "rows.jsonl", addition_rows(35))
    answers = nemorl.evaluate(tmp_path, rows, device="cpu")
    assert answers["accuracy"] == pytest.approx(result.metrics["val_accuracy"])
    assert answers["num_rows"] == len(answers["answers"]) == 35


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_packing": True},
        {"train_micro_batch_size": 3},
        {"sequence_packing": True, "micro_batch_tokens": 32},
    ],
)
def test_the_run_does_not_depend_on_the_layout(tmp_path: Path, options):
    def losses(name: str, **trainer) -> list[float]:
        own = nemorl.TrainerConfig(device="cpu", **trainer)
        return [line["loss"] for line in start(sft_config(tmp_path / name, trainer=own)).history]

    assert losses("cut", **options) == pytest.approx(losses("whole"), abs=2e-5)


def test_dynamic_fine_tuning_is_a_setting(tmp_path: Path):
    (line,) = start(sft_config(tmp_path, steps=1, loss="dft")).history
    assert line["loss"] < line["nll"] / 2 and line["nll"] > 1


def test_validation_loss_is_the_mean_over_tokens(tmp_path: Path):
    examples = to_examples(addition_rows(9), tiny_tokenizer())
    trainer = DTensorBackend(tiny_model(scale=2.0))
    trainer.setup(BackendConfig(trainer=TrainerConfig(device="cpu")))
    model, total, count = tiny_model(scale=2.0), 0.0, 0
    for example in examples:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            logprobs = (
                model(ids, use_cache=False)
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, ids[0, 1:, None])[:, 0]
            )
        kept = torch.tensor(example.loss_mask[1:])
        total, count = total - float(logprobs[kept].sum()), count + int(kept.sum())
    assert validation_loss(trainer, examples, rows=4) == pytest.approx(total / count, abs=1e-5)


def test_epochs_or_steps():
    epochs = nemorl.SFTConfig(num_epochs=3, train_global_batch_size=8)
    assert epochs.planned_steps(20) == 7  # 60 rows, of which the last 4 don't fill a batch
    assert nemorl.SFTConfig(max_num_steps=5).planned_steps(20) == 5
    assert nemorl.SFTConfig().planned_steps(20) == 1


def test_rows_with_messages(tmp_path: Path):
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{%"
        " endif %}{% endfor %}"
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+1="},
                {"role": "assistant", "content": str(i + 1)},
            ]
        }
        for i in range(8)
    ]
    config = sft_config(tmp_path, model=nemorl.ModelConfig(chat_template=template), steps=2)
    result = start(
        config,
        rows=rows,
        validation=[{**row, "answer": row["messages"][1]["content"]} for row in rows],
    )
    assert result.metrics["num_tokens"] == 16 * 6  # 4 tokens, 1 digit, the end token
    assert result.metrics["val_loss"] > 0
    assert result.metrics["val_response_length"] > 0
