"""Whether the numbers are right: parity, attention, sampling, and the tests on this device."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import interleaved, median_ratio, skewed_lengths
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.models import config_of, random_model, trainer
from benchmarks.gpu.part import Measurements, Row, Skip, row
from nemorl import GenerationConfig, SamplingParams
from nemorl.data.batch import to_device
from nemorl.parallel.attention import Kernel, kernel_of, segment_attention, segments_of
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.weights import check_agreement

ROOT = Path(__file__).parent.parent.parent
HEAD_DIM = 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def measurements(small: bool) -> Measurements:
    device = "cpu" if small else "cuda"
    os.environ["NEMORL_TEST_DEVICE"] = device
    for index in range(1 if small else 4):
        yield f"parity {index}", partial(parity, index)
    lengths = [5, 9, 2] if small else skewed_lengths(32, mean=256, longest=2048)
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        for name in KERNELS:
            what = f"attention by {name}, {dtype}".replace("torch.", "")
            yield what, partial(attention, what, name, lengths, device, dtype)
    for precision in ("float32", "bfloat16"):
        shape = "small" if small else "0.5B"
        yield f"sampling, {precision}", partial(sampling, shape, device, precision)
    if not small:
        marked = [
            str(file)
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if re.search(r"mark\.gpu|accelerator: ", file.read_text(encoding="utf-8"))
            and ("engines" not in file.parts or find_spec("vllm"))
        ]
        yield "tests marked gpu", partial(tests, "tests marked gpu", "-m", "gpu", *marked)
    suite, what = "tests/parallel/test_training_conformance.py", "training conformance and resume"
    few = ["-k", "weights_must_be_given and watched"] * small
    yield what, partial(tests, what, suite, *few)
    for index in () if small else (4, 5):
        yield f"parity {index}", partial(parity, index)


def parity(index: int) -> Iterator[Row]:
    """Against plain PyTorch on the CPU in float32, the parity table's own cases."""
    from tests.parallel.parity.cases import Case
    from tests.parallel.parity.golden import Problem
    from tests.parallel.parity.run import run_chunk

    case = (
        Case(plan="one process", layout="packed"),
        Case(plan="one process", layout="packed", problem=Problem(loss="nll", dtype="bfloat16")),
        Case(plan="one process", layout="token budget", activation_checkpointing="full"),
        Case(plan="one process", layout="packed", problem=Problem(lora=True)),
        Case(plan="FSDP2 1", layout="packed"),
        Case(plan="FSDP2 1", layout="packed", compile=True),
    )[index]
    found = run_chunk([case])[0]
    if isinstance(found, str):
        last = found.strip().splitlines()[-1]
        raise Skip(last) if "torchtitan" in last else RuntimeError(last)
    exact = case.problem.dtype == "float32"
    note = "greatest difference" if exact else "rounding, × plain autocast's"
    for name in ("logprobs", "gradient"):
        yield row(f"{case}: {name}", found[name], at_most=5e-6 if exact else 2, note=note)


def by_nemorl(ids: Tensor, dtype: torch.dtype, kernel: Kernel | None = None) -> Attention:
    """By the kernel that training takes, or the given one."""
    chosen = kernel or kernel_of(SimpleNamespace(head_dim=HEAD_DIM), ids.device, dtype)
    options: Any = {"segments": to_device(segments_of(ids.cpu(), chosen), ids.device)}
    return lambda q, k, v: segment_attention(q, k, v, **options).transpose(1, 2)


def by_mask(ids: Tensor, dtype: torch.dtype) -> Attention:
    mask = (ids == ids.T).tril()
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_flex(ids: Tensor, dtype: torch.dtype) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if ids.device.type == "cpu":
        raise Skip("FlexAttention has no backward pass on CPUs")

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[0, query] == ids[0, key])

    size, compiled = ids.shape[1], torch.compile(flex_attention)
    mask = create_block_mask(visible, None, None, size, size, device=ids.device)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


KERNELS = {
    "nemorl": by_nemorl,
    "nemorl in buckets": partial(by_nemorl, kernel="buckets"),
    "SDPA with a block mask": by_mask,
    "FlexAttention": by_flex,
}


def attention(
    what: str, name: str, lengths: list[int], device: str, dtype: torch.dtype
) -> Iterator[Row]:
    """On a packed row, against one sequence after the other in float64."""
    ids = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))[None]
    function, ours = (KERNELS[each](ids.to(device), dtype) for each in (name, "nemorl"))
    shape = (4, 1, 12, sum(lengths), HEAD_DIM)
    inputs = [x.requires_grad_() for x in torch.randn(shape, device=device, dtype=dtype)]
    exact = [x.detach().double().requires_grad_() for x in inputs]

    def one_by_one(*qkv: Tensor) -> Tensor:
        each = zip(*(x.split(lengths, 2) for x in qkv), strict=True)
        return torch.cat([scaled_dot_product_attention(*x, is_causal=True) for x in each], 2)

    def results(function: Attention, tensors: list[Tensor]) -> list[Tensor]:
        output = function(*tensors[:3])
        return [output, *torch.autograd.grad(output, tensors[:3], tensors[3].detach())]

    errors = [
        float((mine.double() - theirs).norm() / theirs.norm())
        for mine, theirs in zip(results(function, inputs), results(one_by_one, exact), strict=True)
    ]
    times = interleaved([partial(results, each, inputs) for each in (function, ours)], 5)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    yield row(f"{what}: output", errors[0], at_most=bound, note="relative to one by one")
    note = f"forward and backward take {median_ratio(times[1], times[0]):.2f} × nemorl's time"
    yield row(f"{what}: gradient", max(errors[1:]), at_most=bound, note=note)


def sampling(shape: str, device: str, precision: str) -> Iterator[Row]:
    """The engine's logprobs against the trainer's, and its greedy answers against transformers'."""
    plan = ParallelPlan(param_dtype=precision)  # type: ignore[arg-type]
    made = trainer(random_model(config_of(shape), device), 64, parallel=plan)
    engine = TorchGenerationBackend(model=made.model, precision=precision)
    engine.setup(GenerationConfig())
    prompts = torch.randint(2, made.model.config.vocab_size, (8, 12)).tolist()
    gaps = []
    for prompt in prompts:
        gaps.append(check_agreement(made, engine, prompt, precision=precision, num_tokens=32))
        engine.wake()
    goal = 1e-4 if precision == "float32" else None
    yield row(f"sampler gap, {precision}", max(gaps), at_most=goal, note="greatest, in nats")
    if goal is None:
        return
    answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=16))
    made.shutdown()  # with it the model has its own attention again
    ids = torch.tensor(prompts, device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
    theirs = engine.model.generate(ids, **options)[:, 12:].tolist()
    same = sum(list(answer.token_ids) == x for answer, x in zip(answers, theirs, strict=True))
    yield row("greedy answers equal to transformers'", same / len(prompts), at_least=1)


def tests(what: str, *arguments: str) -> Iterator[Row]:
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
    if not counts.keys() & {"passed", "failed", "skipped", "error", "errors"}:
        raise Skip(last)
    wrong = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    if wrong:
        print(done.stdout, file=sys.stderr)
    yield row(f"{what}: failures", wrong, at_most=0, note=last)
