"""The scripts of examples/, as modules and as programs, and the files that documents name."""

import importlib
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from nemorl.runtime.config import tree
from nemorl.runtime.config.grpo import GRPOConfig, OnlineConfig
from nemorl.runtime.run import registry
from tests.runtime.runs import addition_rows, rows_file
from tests.tiny_models import tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"


@contextmanager
def forgetting_own() -> Iterator[None]:
    """Take back at the end what was added to the variants of sections of GRPO."""
    owners = {"loss": OnlineConfig, "advantage": GRPOConfig}
    known = {name: owner.__annotations__[name] for name, owner in owners.items()}
    try:
        yield
    finally:
        for section, owner in owners.items():
            owner.__annotations__[section] = known[section]
            owner.__dataclass_fields__[section].type = known[section]
        tree._adapter.cache_clear()


@contextmanager
def visiting() -> Iterator[None]:
    """As for a script in examples/; what it registers is taken back."""
    tables = [
        getattr(registry, table)
        for table in ("ALGORITHMS", "TRAINING_BACKENDS", "GENERATION_BACKENDS")
    ]
    before = [dict(table) for table in tables]
    sys.path.insert(0, str(EXAMPLES))
    try:
        with forgetting_own():
            yield
    finally:
        sys.path.remove(str(EXAMPLES))
        for table, known in zip(tables, before, strict=True):
            table.clear()
            table.update(known)


def load_example(name: str) -> ModuleType:
    """An example as a module."""
    with visiting():
        return importlib.import_module(name)


def run_example(script: str, *arguments: str) -> int:
    """Run an example as a program in the present folder, and return its exit code."""
    before, sys.argv = sys.argv, [str(EXAMPLES / script), *arguments]
    try:
        with visiting():
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


LAST_LINE = re.compile(
    r"held-out greedy accuracy: (\d\.\d\d) -> (\d\.\d\d) \(seed (\d+), (\d+) s of training\)"
)


def write_example_files(folder: Path) -> None:
    """What stands in the guides for a model and data of one's own, and for the quickstart's."""
    tiny_model(scale=2.0, max_position_embeddings=4096).save_pretrained(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder / "model")
    tiny_model(seed=1, scale=3.0, max_position_embeddings=4096).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    for name in ("model", "sft"):
        shutil.copytree(folder / "model", folder / "runs" / "quickstart-0" / name)
    sums = [(row["prompt"], row["answer"]) for row in addition_rows()]
    rows = {
        "demonstrations": [{"prompt": p, "response": a} for p, a in sums],
        "questions": [{"prompt": p, "answer": a} for p, a in sums],
        "pairs": [{"prompt": p, "chosen": a, "rejected": str(int(a) + 1)} for p, a in sums],
    }
    for name, content in rows.items():
        rows_file(folder / f"{name}.jsonl", content)
