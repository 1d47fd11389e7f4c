"""Pieces of the dtensor backend, and agreement with the embedded generator."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from nemorl.models.causal_lm import load_causal_lm
from nemorl.models.hub import max_positions
from nemorl.parallel.attention import segment_attention, segments_of
from nemorl.rollout.collect import collect
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.conversation import Prompts
from nemorl.rollout.environment import FunctionalRewardWrapper
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.varlen import used_on_cpus  # noqa: F401  # which has the kernel
from tests.parallel.ways import set_up
from tests.rollout.updates import update
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer


@given(
    st.lists(st.lists(st.integers(1, 17), min_size=0, max_size=5), min_size=1, max_size=3),
    st.integers(0, 5),
    st.integers(0, 2**31),
    st.sampled_from(["buckets", "varlen_attn"]),
)
def test_segments_attend_to_themselves_alone(
    rows: list[list[int]], padding: int, seed: int, kernel: Any
):
    width = max(1, max(sum(row) for row in rows) + padding)
    segments = torch.zeros(len(rows), width, dtype=torch.long)
    for r, row in enumerate(rows):
        filled = [i + 1 for i, length in enumerate(row) for _ in range(length)]
        segments[r, : len(filled)] = torch.tensor(filled, dtype=torch.long)
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(len(rows), heads, width, size, dtype=torch.float64).requires_grad_()
        # In buckets values may be of another size.
        for heads, size in ((4, 4), (2, 4), (2, 6 if kernel == "buckets" else 4))
    )
    real = (segments > 0)[:, :, None, None]
    out = segment_attention(q, k, v, segments=segments_of(segments, kernel))
    same = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    expected = scaled_dot_product_attention(q, k, v, attn_mask=same, enable_gqa=True)
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(torch.where(real, out, 0.0), torch.where(real, expected, 0.0))
    cotangent = torch.where(real, torch.randn(out.shape, dtype=torch.float64), 0.0)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), cotangent) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)


@given(st.lists(st.integers(1, 70), min_size=2, max_size=40), st.integers(0, 9))
def test_buckets_hold_every_token_once_and_waste_little(lengths: list[int], padding: int):
    ids = [i + 1 for i, length in enumerate(lengths) for _ in range(length)]
    segments = torch.tensor([ids + [0] * padding])
    buckets = segments_of(segments, "buckets")
    assert buckets is not None
    laid_out = torch.cat([*(tokens.flatten() for tokens in buckets.tokens), torch.tensor([-1])])
    found = laid_out[buckets.places]
    assert found.tolist() == [i if i < sum(lengths) else -1 for i in range(segments.numel())]
    inside = [[len(set(row)) for row in tokens.tolist()] for tokens in buckets.tokens]
    assert sorted(size for sizes in inside for size in sizes) == sorted(lengths)
    for tokens, sizes in zip(buckets.tokens, inside, strict=True):
        assert tokens.shape[1] == max(sizes) <= max(1.25 * min(sizes), min(sizes) + 0.5)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_sampler_and_the_trainer_agree(packing, precision):
    trainer = set_up(
        tiny_model(scale=2.0),
        trainer={"sequence_packing": packing},
        plan={"param_dtype": precision},
    )
    generator = TorchGenerationBackend(
        model=trainer.model, tokenizer=tiny_tokenizer(), precision=precision
    )
    generator.setup(GenerationConfig())
    prompts = Prompts([{"prompt": ""}] * 6, random_prompts(6))
    reward = FunctionalRewardWrapper(lambda prompt, response: 0.0)
    for step in range(2):
        for filters in ({}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}):
            sampling = SamplingParams(n=4, max_new_tokens=12, **filters)
            batch = collect(generator, reward, prompts, sampling, seed=step).to_batch()
            ours = trainer.get_logprobs(batch).values
            gaps = (ours - batch.generation_logprobs)[batch.loss_mask].abs()
            assert gaps.max() < (1e-5 if precision == "float32" else 0.5)
            assert gaps.mean() < (1e-6 if precision == "float32" else 0.03)
        trainer.train_step(random_batch([5, 9], seed=step), nll_loss)
        update(generator, trainer.weights(), version=step + 1)


def test_a_model_that_was_not_checked_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"'gpt2' is neither: run nemorl models check FOLDER"):
        set_up(gpt)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_limit_the_length(kind):
    short = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16, **short}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, rope_parameters={**rope, "rope_theta": 1e4})
    assert max_positions(config) == (16 if kind == "longrope" else 64)
    assert max_positions(LlamaConfig(**sizes)) == 64


def test_loading(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    loaded, *fresh = (
        load_causal_lm(str(tmp_path / "model"), **options).model.embed_tokens.weight
        for options in ({}, {"from_scratch": True}, {"from_scratch": True, "seed": 1})
    )
    assert torch.equal(loaded, tiny_model().model.embed_tokens.weight)
    assert not torch.equal(*fresh) and fresh[0].dtype == torch.float32


def test_the_model_is_handed_back_as_it_came():
    model, fresh = tiny_model(scale=3.0), tiny_model(scale=3.0)
    backend = set_up(model, plan={"activation_checkpointing": "full"})
    backend.get_logprobs(random_batch([4]))
    backend.shutdown()
    assert not model.training
    assert model.config._attn_implementation == fresh.config._attn_implementation
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    options = {"attention_mask": (ids > 0).long(), "do_sample": False, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, **options), fresh.generate(ids, **options))


def test_cudnn_makes_no_plans_while_a_model_trains():
    gc.collect()  # models of other tests, which nobody shut down
    before = torch.backends.cuda.cudnn_sdp_enabled()
    backend = set_up(tiny_model())
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    backend.shutdown()
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


@pytest.mark.parametrize("rank", [0, 2])
def test_setup_refuses_other_weights_than_a_checkpoint_began_with(rank: int, tmp_path: Path):
    lora = {"rank": rank}
    first = set_up(tiny_model(), lora=lora)
    first.train_step(random_batch([5, 6]), nll_loss)
    first.save_checkpoint(tmp_path / "first")
    set_up(tiny_model(), lora=lora, same_initial_model_as=tmp_path / "first")
    message = "first must be of a run that began with the model in use, .* load the initial model"
    with pytest.raises(ValueError, match=message):
        set_up(tiny_model(seed=1), lora=lora, same_initial_model_as=tmp_path / "first")


def test_what_does_not_train_takes_no_step():
    model, batch = tiny_model(), random_batch([5, 6])
    expected = set_up(tiny_model()).get_logprobs(batch).values
    teacher = set_up(model, trains=False)
    assert teacher.optimizer is None and not any(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="trains must be True for steps and checkpoints of a"):
        teacher.forward_backward(batch, nll_loss)
    teacher.offload()
    assert torch.equal(teacher.get_logprobs(batch).values, expected)
    teacher.shutdown()
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_on_a_batch_alone_and_an_error_drop_the_gradients_before(fails: bool):
    def failing(output: Any, batch: Any) -> Any:
        raise ArithmeticError

    first, second, found = random_batch([5, 6]), random_batch([9, 2, 30], seed=1), []
    for added in (False, True):
        backend = set_up(tiny_model(scale=2.0))
        if added:
            backend.forward_backward(first, nll_loss)
        if added and fails:
            with pytest.raises(ArithmeticError):
                backend.forward_backward(first, failing)
        if fails:
            backend.forward_backward(second, nll_loss)
            backend.optim_step()
        else:
            backend.train_step(second, nll_loss)
        found.append(dict(backend.weights()))
    torch.testing.assert_close(*found, atol=0, rtol=0)
