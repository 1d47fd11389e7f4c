"""Rollouts by vLLM: what the way through Ray costs, and what a second replica and balancing bring.

    python benchmarks/rollouts.py [--part ray|replicas] [--small]

ray: tokens per second of one replica in a process of its own, placed by Ray, against the bare
`vllm.LLM.generate` in another process, on the same requests in turn. replicas: two replicas that
share a queue, two that get every other prompt, and one, on responses of very unequal lengths.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from common import (
    VOCABULARY,
    command,
    interleaved,
    load_tokenizer,
    median_ratio,
    quiet,
    save_model,
)

ENGINE = {"kv_cache_memory_bytes": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is generated."""

    part: Literal["ray", "replicas", "both"] = "both"
    """Which of the two comparisons."""
    num_prompts: int = 64
    """Prompts of 16 tokens."""
    group_size: int = 8
    """Responses to each."""
    length: int = 64
    """Tokens of a response, where all have the same."""
    hidden: int = 256
    """Width of the model, which has four layers."""
    rounds: int = 7
    """Each engine's turns; the median counts."""


def bare_engine(folder: Path, pipe: Any) -> None:
    """`LLM.generate` in a process of its own: answers each list of (prompt, sampling parameters)
    with the seconds it took and the tokens it made.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"], os.environ["VLLM_CPU_OMP_THREADS_BIND"] = (
        "0",
        "nobind",
    )
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        tokenizer=str(folder / "tokenizer"),
        dtype="float32",
        max_num_seqs=256,
        enforce_eager=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        **ENGINE,
    )
    while (requests := pipe.recv()) is not None:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(**options, logprobs=0, ignore_eos=True) for _, options in requests]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        pipe.send(
            (
                time.perf_counter() - start,
                sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
            )
        )


@contextmanager
def bare(folder: Path) -> Iterator[Callable[[list[Any]], tuple[float, int]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=bare_engine, args=(folder, theirs), daemon=True)
    process.start()

    def generate(requests: list[Any]) -> tuple[float, int]:
        ours.send(requests)
        return ours.recv()

    yield generate
    ours.send(None)
    process.join(30)


@contextmanager
def backend(folder: Path, num_replicas: int, engine: Mapping[str, Any] = ENGINE) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    from nemorl import GenerationConfig
    from nemorl.runtime.engines.backend import VLLMGenerationBackend

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token = (
        None  # every response is as long as it may be
    )
    made = VLLMGenerationBackend(model=model, tokenizer=tokenizer)
    made.setup(GenerationConfig(backend="vllm", num_replicas=num_replicas, engine=dict(engine)))
    try:
        yield made
    finally:
        made.shutdown()


def through_ray(options: Options, folder: Path) -> None:
    import torch

    from nemorl import SamplingParams

    prompts = torch.randint(
        2, VOCABULARY, (options.num_prompts, 16), generator=torch.Generator().manual_seed(0)
    ).tolist()
    params = [
        SamplingParams(n=options.group_size, max_new_tokens=options.length, seed=1000 * i)
        for i in range(options.num_prompts)
    ]
    requests = [
        (prompt, {"n": p.n, "max_tokens": p.max_new_tokens, "seed": p.seed})
        for prompt, p in zip(prompts, params, strict=True)
    ]
    bare_too = {
        "with text": requests,
        "tokens alone": [(prompt, {**o, "detokenize": False}) for prompt, o in requests],
    }
    ours, theirs = [], {name: [] for name in bare_too}
    with bare(folder) as bare_generate, backend(folder, 1) as engine:
        for number in range(options.rounds + 1):
            start = time.perf_counter()
            completions = engine.generate(prompts, params)
            seconds = time.perf_counter() - start
            tokens = sum(len(c.token_ids) for c in completions)
            if number:  # one round before is not counted
                ours.append(seconds)
            for name, asked in bare_too.items():
                bare_seconds, made = bare_generate(asked)
                assert made == tokens, f"not the same work: {tokens} and {made} tokens"
                if number:
                    theirs[name].append(bare_seconds)
    print(f"through Ray, with text {tokens / median(ours):8.0f} tokens/s")
    for name, seconds in theirs.items():
        print(
            f"bare vLLM, {name:<12} {tokens / median(seconds):7.0f} tokens/s   ratio"
            f" {median_ratio(ours, seconds):.3f}"
        )


def with_replicas(options: Options, folder: Path) -> None:
    import torch

    from nemorl import SamplingParams

    prompts = torch.randint(
        2, VOCABULARY, (options.num_prompts, 16), generator=torch.Generator().manual_seed(0)
    ).tolist()
    # Nearly every token is as likely as another: a dozen of them that stop give geometric lengths
    # with a mean of about 40.
    params = [
        SamplingParams(
            n=options.group_size,
            max_new_tokens=256,
            stop_token_ids=tuple(range(2, 14)),
            seed=1000 * i,
        )
        for i in range(options.num_prompts)
    ]
    with ExitStack() as stack:
        pair = stack.enter_context(backend(folder, 2))
        counted = sum(len(c.token_ids) for c in pair.generate(prompts, params))

        def balanced() -> None:
            pair.generate(prompts, params)

        seconds_balanced = interleaved([balanced], options.rounds)[0]
        print(
            f"two replicas, one queue           {counted / median(seconds_balanced):8.0f} tokens/s"
        )
    with ExitStack() as stack:
        each = [stack.enter_context(backend(folder, 1)) for _ in range(2)]

        def split() -> None:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda i: each[i].generate(prompts[i::2], params[i::2]), range(2)))

        def alone() -> None:
            each[0].generate(prompts, params)

        seconds_split, seconds_alone = interleaved([split, alone], options.rounds)
    for name, seconds in (
        ("two replicas, every other prompt", seconds_split),
        ("one replica", seconds_alone),
    ):
        print(
            f"{name:<33} {counted / median(seconds):8.0f} tokens/s   balanced is"
            f" {median(seconds) / median(seconds_balanced):.2f} times as fast"
        )


def main(options: Options) -> None:
    quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        count = save_model(Path(folder), hidden=options.hidden)
        print(
            f"{count / 1e6:.1f} M parameters, {options.num_prompts} prompts x {options.group_size}"
            " responses"
        )
        if options.part in ("ray", "both"):
            through_ray(options, Path(folder))
        if options.part in ("replicas", "both"):
            with_replicas(replace(options, rounds=max(3, options.rounds // 2)), Path(folder))


if __name__ == "__main__":
    command(main, Options, num_prompts=4, length=8, hidden=128, rounds=1)
