"""A student learns from a teacher: one backend's `compute` fills the batches of another."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import nemorl
from nemorl.losses import distillation_topk
from nemorl.losses.kl import divergence
from nemorl.losses.types import LossOutput, finalize
from tests.parallel.batches import LAYOUTS, random_batch
from tests.parallel.ways import set_up
from tests.tiny_models import tiny_model

OPTIONS = {"outside": "zero", "direction": "mixed"}


@nemorl.needs(targets=True, entropy=True)
def distill(output, batch: nemorl.TokenBatch) -> LossOutput:
    student = output.target_logprobs, output.target_rest_logprobs
    teacher = batch.target_ids, batch.teacher_logprobs
    return distillation_topk(
        *student, *teacher, batch.loss_weights, entropy=output.entropy, **OPTIONS
    )


def taught(batch: nemorl.TokenBatch, teacher: nemorl.TrainingBackend) -> nemorl.TokenBatch:
    found = teacher.compute(batch, nemorl.Needs(top_k=8))
    return replace(batch, target_ids=found.top_ids, teacher_logprobs=found.top_logprobs)


def of_whole_logits(student: nn.Module, teacher: nn.Module, batch: nemorl.TokenBatch) -> Tensor:
    """`distill` from the definition: the teacher's 8 likeliest, and e^-100 for all others."""
    total = torch.tensor(0.0)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[row : row + 1, :length]
        with torch.no_grad():
            log_p, top = teacher(ids, use_cache=False).logits.log_softmax(-1).topk(8)
        log_q = student(ids, use_cache=False).logits.log_softmax(-1)
        log_p = torch.full_like(log_q, -100.0).scatter(-1, top, log_p.log_softmax(-1))
        tokens = divergence(log_q, log_p, direction="mixed")[0, :-1]
        total = total + (batch.loss_weights[row, 1:length] * tokens).sum()
    return total


def test_a_student_learns_what_its_teacher_says():
    models = tiny_model(), tiny_model(seed=1, scale=3.0)
    student, teacher = (
        set_up(model, trainer=LAYOUTS[name])
        for model, name in zip(models, ("three rows", "packed"), strict=True)
    )
    plain, batch = tiny_model(), taught(random_batch([9, 2, 1, 12]), teacher)
    expected = of_whole_logits(plain, tiny_model(seed=1, scale=3.0), batch)
    expected.backward()
    student.forward_backward(batch, distill)
    grads = {name: each.grad for name, each in student.model.named_parameters()}
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    torch.testing.assert_close(grads, wanted, atol=2e-6, rtol=1e-4)
    assert finalize(student.optim_step())["loss"] == pytest.approx(expected.item(), rel=1e-6)
    steps = [finalize(student.train_step(batch, distill)) for _ in range(7)]
    assert steps[-1]["divergence"] < 0.7 * expected.item()
