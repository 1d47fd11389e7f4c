"""Whether the numbers are right: parity, attention, sampling, and the tests on this device."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import interleaved, median_ratio, skewed_lengths
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.models import config_of, random_model, trainer
from benchmarks.gpu.part import Measurements, Row, Skip, row
from nemorl import GenerationConfig, SamplingParams
from nemorl.data.batch import Example, collate
from nemorl.parallel.dtensor.attention import segment_attention, segment_buckets
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.torch_backend import TorchGenerationBackend

ROOT = Path(__file__).parent.parent.parent
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def measurements(small: bool) -> Measurements:
    device = "cpu" if small else "cuda"
    os.environ["NEMORL_TEST_DEVICE"] = device
    for index in range(1 if small else 4):
        yield f"parity, case {index + 1}", partial(parity, index)
    lengths = [5, 9, 2] if small else skewed_lengths(32, mean=256, longest=2048)
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        for name in KERNELS:
            what = f"attention by {name}, {dtype}".replace("torch.", "")
            yield what, partial(attention, what, name, lengths, device, dtype)
    shape = "small" if small else "0.5B"
    for precision in ("float32", "bfloat16"):
        yield f"sampling, {precision}", partial(sampling, shape, device, precision)
    if not small:
        files = [
            str(file)
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.gpu" in file.read_text(encoding="utf-8")
            and ("engines" not in file.parts or find_spec("vllm"))
        ]
        yield "tests marked gpu", partial(tests, "tests marked gpu", "-m", "gpu", *files)
    suite, what = "tests/parallel/test_training_conformance.py", "training conformance and resume"
    few = ["-k", "weights_must_be_given and watched"] * small
    yield what, partial(tests, what, suite, *few)
    for index in () if small else (4, 5):
        yield f"parity, case {index + 1}", partial(parity, index)


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


def by_nemorl(lengths: list[int], device: str) -> Attention:
    buckets = segment_buckets(segments(lengths, device))
    return lambda q, k, v: segment_attention(None, q, k, v, None, segment_buckets=buckets)[
        0
    ].transpose(1, 2)


def by_mask(lengths: list[int], device: str) -> Attention:
    ids = segments(lengths, device)[0]
    mask = (ids[:, None] == ids).tril()
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_flex(lengths: list[int], device: str) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device == "cpu":
        raise Skip("FlexAttention has no backward pass on CPUs")
    ids = segments(lengths, device)[0]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[query] == ids[key])

    mask = create_block_mask(visible, None, None, len(ids), len(ids), device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def by_varlen(lengths: list[int], device: str) -> Attention:
    """FlashAttention for sequences of several lengths, as PyTorch has it."""
    if device == "cpu":
        raise Skip("varlen_attn needs a GPU")
    from torch.nn.attention.varlen import varlen_attn

    # A flag became a window after torch 2.10.
    has_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal: Any = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}
    begins = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def attend(*qkv: Tensor) -> Tensor:
        tokens = (x[0].transpose(0, 1) for x in qkv)
        longest = max(lengths)
        output: Any = varlen_attn(*tokens, begins, begins, longest, longest, **causal)
        return output.transpose(0, 1)[None]

    return attend


KERNELS = {
    "nemorl": by_nemorl,
    "SDPA with a block mask": by_mask,
    "FlexAttention": by_flex,
    "varlen_attn": by_varlen,
}


def segments(lengths: list[int], device: str) -> Tensor:
    ids = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    return ids[None].to(device)


def attention(
    what: str, name: str, lengths: list[int], device: str, dtype: torch.dtype
) -> Iterator[Row]:
    """On a packed row, against one sequence after the other in float64."""
    function, ours = KERNELS[name](lengths, device), by_nemorl(lengths, device)
    if dtype == torch.float32 and name == "varlen_attn":
        raise Skip("has no float32")
    inputs = [
        torch.randn(1, 12, sum(lengths), 64, device=device, dtype=dtype).requires_grad_()
        for _ in range(4)
    ]
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
    """Greedy answers against transformers', and the sampler's logprobs against the trainer's."""
    plan = ParallelPlan(param_dtype=precision)  # type: ignore[arg-type]
    made = trainer(random_model(config_of(shape), device), 64, parallel=plan)
    engine = TorchGenerationBackend(model=made.model, precision=precision)
    engine.setup(GenerationConfig())
    prompts = torch.randint(2, made.model.config.vocab_size, (8, 12)).tolist()
    found = engine.generate(prompts, SamplingParams(max_new_tokens=32, seed=0))
    batch = collate(
        [
            Example(
                input_ids=[*prompt, *each.token_ids],
                loss_mask=(mask := [False] * len(prompt) + [True] * len(each.token_ids)),
                response_mask=mask,
                generation_logprobs=[0.0] * len(prompt) + list(each.logprobs),
            )
            for prompt, each in zip(prompts, found, strict=True)
        ]
    )
    gap = (made.get_logprobs(batch).values - batch.generation_logprobs)[batch.loss_mask].abs()
    note = f"mean {float(gap.mean()):.1e}, in nats"
    goal = 1e-4 if precision == "float32" else None
    yield row(f"sampler gap, {precision}: greatest", float(gap.max()), at_most=goal, note=note)
    if precision == "float32":
        answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=16))
        made.shutdown()  # with it the model has its own attention again
        same = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt], device=device)
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            whole = engine.model.generate(ids, max_new_tokens=16, **options)
            same += whole[0, len(prompt) :].tolist() == list(answer.token_ids)
        yield row("greedy answers equal to transformers'", same / len(prompts), at_least=1)


def tests(what: str, *arguments: str) -> Iterator[Row]:
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
    if not counts.keys() & {"passed", "failed", "skipped", "error", "errors"}:
        raise Skip(last)
    names = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if names:
        print(done.stdout, file=sys.stderr)
    wrong = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    yield row(f"{what}: failures", wrong, at_most=0, note="; ".join([last, *names[:3]]))
