"""What the benchmarks share: a small model with its tokenizer in a folder, response lengths, and
interleaved timing.
"""

import contextlib
import gc
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

VOCABULARY = 512
"""Tokens t2 … t511, written with spaces between them; token 0 pads and ends, token 1 is for what is
unknown.
"""


def command(main: Callable[[Any], None], options: type, **small: Any) -> None:
    """Run a benchmark with options from the command line.

    small: the options that `--small` sets, for a run of seconds that shows that it works.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--small"]
    default = options(**small) if len(arguments) < len(sys.argv) - 1 else options()
    main(tyro.cli(options, args=arguments, default=default))


class Stopwatch:
    """Seconds spent in wrapped functions since `take` was last called, in the outermost ones."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, start = self.seconds, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds = before + time.perf_counter() - start

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def share_of_even(prompt: str, response: str) -> float:
    """A reward that a random model earns now and then."""
    return sum(token[-1] in "02468" for token in response.split()) / max(1, len(response.split()))


def quiet() -> None:
    """Nothing on the screen but the results."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def model_config(kind: str = "qwen2", **sizes: Any) -> Any:
    """The configuration of a model type, of the sizes of a Qwen2 of 0.3 M parameters but for
    `sizes`.
    """
    from transformers import CONFIG_MAPPING

    hidden = sizes.get("hidden_size", 64)
    default = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return CONFIG_MAPPING[kind](**{**default, **sizes})


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def save_model(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    positions: int = 512,
    seed: int = 0,
) -> int:
    """A Qwen2 with random weights, and in `tokenizer` one of a token per word. Returns the number
    of parameters.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

    words = {"<end>": 0, "<unknown>": 1, **{f"t{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<end>", eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder / "tokenizer")
    torch.manual_seed(seed)
    config = model_config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


@contextlib.contextmanager
def saved_model(**sizes: Any) -> Iterator[tuple[Path, int]]:
    """Quietly give a temporary folder with `save_model`'s in `model`, and its number of parameters.

    sizes: of `save_model`.
    """
    quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield folder, save_model(folder / "model", **sizes)


def load_tokenizer(folder: Path) -> Any:
    """That of `save_model`.

    It lies apart, because AutoTokenizer would make a tokenizer of Qwen2's kind of whatever lies
    beside a Qwen2.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def words(count: int, rng: np.random.Generator) -> str:
    """A text of `count` tokens."""
    return " ".join(f"t{i}" for i in rng.integers(2, VOCABULARY, count))


def skewed_lengths(count: int, *, mean: float = 40, longest: int = 256, seed: int = 0) -> list[int]:
    """Log-normal lengths: a few are long, most are short."""
    spread = 0.8
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(lengths.round().astype(int), 1, longest).tolist()


def interleaved(
    candidates: Sequence[Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of each candidate in each round.

    They take turns, so that a busy machine slows all of them; one round before is not counted.

    clock: time.process_time on a busy machine, where one thread computes.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    for number in range(rounds + 1):
        for candidate, times in zip(candidates, seconds, strict=True):
            gc.collect()
            start = clock()
            candidate()
            synchronize()
            if number:
                times.append(clock() - start)
    return seconds


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of theirs / ours: how many times as fast we are."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Swallow what trainers print."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
