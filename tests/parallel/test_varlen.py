"""One call of a kernel for sequences of any lengths is attention within each of them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention

from nemorl.data import pack, pack_plan
from nemorl.data.batch import to_device
from nemorl.models.attention import Rule
from nemorl.parallel.attention import (
    Kernel,
    choose_kernel,
    kernel_of,
    segment_attention,
    segments_of,
)
from nemorl.parallel.tokens import work_of
from tests.parallel.batches import GROUPS, grouped, nll_loss, random_batch
from tests.parallel.varlen import Call, used_on_cpus
from tests.parallel.ways import set_up
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

IDS = torch.tensor([[1, 1, 1, 2, 0, 0], [1, 1, 2, 2, 2, 3]])


def heads(*counts: int, rows: tuple[int, int], dim: int = 8, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(rows[0], count, rows[1], dim) for count in counts]
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


@given(GROUPS, st.booleans(), st.sampled_from(["buckets", "varlen_attn"]))
def test_prompts_that_are_computed_once_are_seen_by_each_response(
    groups: Any, packed: bool, kernel: Any
):
    batch = grouped(groups, letters=9)
    if packed:
        lengths = batch.lengths.tolist()
        batch = pack(batch, pack_plan(lengths, 2 * max(lengths)))
    work = work_of(batch, batch.loss_mask, share=True, multiple_of=4, kernel=kernel)
    if work.shared is None:
        return
    place, ids = work.shared[1], batch.segment_ids
    qkv = heads(4, 2, 2, rows=(1, work.input_ids.shape[1]), dtype=torch.float64)
    found = segment_attention(*qkv, segments=work.segments, rule=Rule(scaling=0.3))
    assert not found[0, len(work.shared[0]) :].any()
    copies = [x[0].index_select(1, place).unflatten(1, ids.shape).transpose(0, 1) for x in qkv]
    same = (ids[:, :, None] == ids[:, None]).tril()[:, None]
    whole = scaled_dot_product_attention(*copies, attn_mask=same, enable_gqa=True, scale=0.3)
    real = ids.flatten() > 0
    ours, theirs = found[0, place][real], whole.transpose(1, 2).flatten(0, 1)[real]
    torch.testing.assert_close(ours, theirs)
    cotangent = torch.randn_like(ours)
    gradients = (torch.autograd.grad(x, qkv, cotangent) for x in (ours, theirs))
    torch.testing.assert_close(*gradients)


def test_what_the_kernel_is_asked_for():
    batch, lengths = random_batch([9, 2, 30, 17, 1]), [30, 1, 17, 9, 2]
    options: dict[str, Any] = {"sequence_packing": True, "packed_row_tokens": 59}
    for precision in ("float32", "bfloat16"):
        with used_on_cpus() as calls:
            plan = {"param_dtype": precision}
            backend = set_up(tiny_model(head_dim=16), trainer=options, plan=plan)
            backend.train_step(batch, nll_loss)
        assert len(calls) == 2 and calls[0] == calls[1]
        found = torch.tensor(calls[0].cu_seqlens).diff().tolist()
        assert sorted(found) == sorted(lengths)
        dtype = getattr(torch, precision)
        assert calls[0] == Call(calls[0].cu_seqlens, 30, (4, 2), 16**-0.5, dtype)


def test_dropout_is_refused():
    segments = segments_of(IDS, "varlen_attn")
    with pytest.raises(ValueError, match=r"dropout must be 0 on a GPU, but it is 0\.1"):
        segment_attention(*heads(4, 2, 2, rows=(2, 6)), rule=Rule(dropout=0.1), segments=segments)


ALL = ("varlen_attn", "flash_attn")
FITS: dict[str, Any] = {
    "capability": (9, 0),
    "dtype": torch.bfloat16,
    "head_dim": 128,
    "dropout": 0.0,
    "installed": ALL,
}


@pytest.mark.parametrize(
    ("other", "kernel"),
    [
        ({}, "varlen_attn"),
        ({"head_dim": 256, "capability": (12, 0)}, "varlen_attn"),
        ({"installed": ALL[1:]}, "flash_attn"),
        ({"installed": ()}, "buckets"),
        ({"capability": (7, 5)}, "buckets"),
        ({"dtype": torch.float32}, "buckets"),
        ({"head_dim": 100}, "buckets"),
        ({"head_dim": 512}, "buckets"),
        ({"dropout": 0.1}, "buckets"),
    ],
    ids=repr,
)
def test_which_kernel_is_chosen(other: dict[str, Any], kernel: str):
    case = FITS | other
    assert choose_kernel(case.pop("capability"), case.pop("dtype"), **case) == kernel


@pytest.fixture
def package(monkeypatch) -> Iterator[list[dict[str, Any]]]:
    """The package flash-attn, version 2.8, which PyTorch's kernel stands for; yields the
    settings of its calls.
    """
    calls = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *rows: Any,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> torch.Tensor:
        assert causal
        calls.append({"softmax_scale": softmax_scale, "deterministic": deterministic})
        options: Any = {"scale": softmax_scale, "enable_gqa": q.shape[1] != k.shape[1]}
        return torch_varlen.varlen_attn(q, k, v, *rows, window_size=window_size, **options)  # type: ignore[return-value]

    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.mark.parametrize("window", [None, 2])
def test_the_package_is_asked_for_the_same(package, window: int | None):
    qkv, rule = heads(4, 2, 2, rows=(2, 6)), Rule(scaling=0.3, window=window)
    kernels: tuple[Kernel, ...] = ("flash_attn", "varlen_attn", "buckets")
    found = [segment_attention(*qkv, segments=segments_of(IDS, one), rule=rule) for one in kernels]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)
    torch.use_deterministic_algorithms(True)
    try:
        segment_attention(*qkv, segments=segments_of(IDS, "flash_attn"))
    finally:
        torch.use_deterministic_algorithms(False)
    asked = {"softmax_scale": 0.3, "deterministic": False}
    assert package == [asked, {**asked, "softmax_scale": None, "deterministic": True}]


def calls_of_a_step(folder: Path, how: Any) -> int:
    with used_on_cpus() as calls:
        plan = {"dp_shard": 1, "activation_checkpointing": how}
        backend = set_up(None, folder, plan=plan)
        backend.train_step(random_batch([9, 2, 30]), nll_loss)
        backend.shutdown()
        return len(calls)


@pytest.mark.slow
def test_selective_checkpointing_keeps_what_attention_returned(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    found = {how: run_ranks(1, calls_of_a_step, tmp_path, how)[0] for how in ("selective", "full")}
    assert found == {"selective": 2, "full": 4}


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_gpus_kernel_rounds_as_buckets_do(dim: int):
    lengths = [700, 3, 129, 1, 64, 300]
    ids = torch.arange(1, 7).repeat_interleave(torch.tensor(lengths))
    ids = torch.nn.functional.pad(ids, (0, 27))[None]
    exact = heads(4, 2, 2, rows=(1, ids.shape[1]), dim=dim, dtype=torch.float64, device="cuda")
    qkv = [x.detach().bfloat16().requires_grad_() for x in exact]
    cotangent = torch.randn(1, ids.shape[1], 4, dim, dtype=torch.float64, device="cuda")
    found = []
    for kernel, inputs in (("buckets", exact), ("buckets", qkv), ("varlen_attn", qkv)):
        segments = to_device(segments_of(ids, kernel), torch.device("cuda"))  # type: ignore[arg-type]
        output = segment_attention(*inputs, segments=segments)
        gradients = torch.autograd.grad(output, inputs, cotangent.to(output))
        found.append([output, *gradients])
    assert kernel_of(SimpleNamespace(head_dim=dim), qkv[0].device, torch.bfloat16) == "varlen_attn"
    for truth, dense, ours in zip(*found, strict=True):
        usual, own = ((x.double() - truth).norm() for x in (dense, ours))
        assert 0 < own <= 2 * usual
