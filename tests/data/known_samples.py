"""Small generated samples with the columns that known data sets have, a hub that holds them, and
what rewards make of answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from nemorl.data.datasets import prompt_of
from nemorl.rollout.environments import make_environment
from tests.data.tokenizers_small import talk

LOAD = datasets.load_dataset
LETTERS = ("A", "B", "C", "D")
MESSAGES = talk("1+1?", "2")


def judged(reward: str, rows: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """What a reward makes of a response to each row."""
    environment = make_environment(reward)
    environment.check(rows)
    logs = [
        talk(str(prompt_of(row)), response) for row, response in zip(rows, responses, strict=True)
    ]
    return list(environment.step(logs, rows).rewards)


def gsm8k(n: int) -> dict[str, Any]:
    total = 2 * n + 1
    return {
        "question": f"Ann has {n} eggs and gets {n + 1}. How many?",
        "answer": f"{n}+{n + 1}=<<{n}+{n + 1}={total}>>{total}.\n#### {total}",
    }


def maths(n: int) -> dict[str, Any]:
    return {"problem": f"What is ${n}+{n + 1}$?", "solution": f"It is $\\boxed{{{2 * n + 1}}}$."}


def gpqa(n: int) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {i}": f"{100 * i + n} eV\n" for i in (1, 2, 3)}
    return {
        "Record ID": f"rec{n}",
        "Question": f"Which energy has level {n}?\n",
        "Correct Answer": f"{n} eV ",
        **wrong,
        "High-level domain": ("Physics", "Chemistry")[n % 2],
    }


def openr1(n: int) -> dict[str, Any]:
    return {**answered(n), "problem_type": "Algebra", "messages": MESSAGES}


def ultrafeedback(n: int) -> dict[str, Any]:
    return {
        "prompt": "1+1?",
        "chosen": MESSAGES,
        "rejected": talk("1+1?", "3"),
        "messages": MESSAGES,
    }


def dapo(n: int) -> dict[str, Any]:
    content = f"Solve the following math problem step by step. {maths(n)['problem']}"
    return {
        "data_source": "math_dapo",
        "prompt": talk(content),
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * n + 1), "style": "rule-lighteval/MATH_v2"},
    }


def mmlu_pro(n: int) -> dict[str, Any]:
    options = [str(n + i) for i in range(10)]
    return {
        "question": f"What is {n}+{n % 10}?",
        "options": options,
        "answer": "ABCDEFGHIJ"[n % 10],
        "answer_index": n % 10,
        "category": ("math", "law")[n % 2],
    }


def humaneval(n: int) -> dict[str, Any]:
    return {
        "task_id": f"HumanEval/{n}",
        "prompt": f'def add_{n}(x: int) -> int:\n    """Add {n}."""\n',
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
        "entry_point": f"add_{n}",
    }


def mbpp(n: int) -> dict[str, Any]:
    return {
        "task_id": n,
        "text": f"Write a function add_{n} that adds {n}.",
        "code": f"def add_{n}(x):\r\n    return x + {n}",
        "test_list": [f"assert add_{n}(1) == {n + 1}", f"assert add_{n}(0) == {n}"],
        "test_setup_code": "",
    }


def sanitized_mbpp(n: int) -> dict[str, Any]:
    row = mbpp(n)
    kept = {name: row[name] for name in ("task_id", "code", "test_list")}
    kept["test_list"] += [f"assert add_{n}(math.floor(1.5)) == {n + 1}"]
    return {
        "prompt": row["text"],
        "test_imports": ["import math"],
        **kept,
    }


def arc(n: int) -> dict[str, Any]:
    labels = list(LETTERS) if n % 2 else ["1", "2", "3", "4"]
    return {
        "question": f"What is {n}+1?",
        "choices": {"text": [str(n), str(n + 1), "x", "y"], "label": labels},
        "answerKey": labels[1],
    }


def mmlu(n: int) -> dict[str, Any]:
    return {
        "question": f"What is {n}+2?",
        "subject": "abstract_algebra",
        "choices": [str(n + i) for i in range(4)],
        "answer": 2,
    }


def ifeval(n: int) -> dict[str, Any]:
    named = [
        ("punctuation:no_comma", {"relation": None, "keyword": None, "frequency": None}),
        ("keywords:frequency", {"relation": "at least", "keyword": "egg", "frequency": n}),
    ]
    kept = named[: 1 + n % 2]
    return {
        "prompt": f"Write about {n} eggs.",
        "instruction_id_list": [name for name, _ in kept],
        "kwargs": [given for _, given in kept],
    }


def answered(n: int) -> dict[str, Any]:
    return {**maths(n), "answer": str(2 * n + 1)}


SAMPLES: dict[tuple[str, str | None], tuple[Any, tuple[str, ...]]] = {
    ("openai/gsm8k", "main"): (gsm8k, ("train", "test")),
    ("openai/gsm8k", "socratic"): (gsm8k, ("train", "test")),
    ("HuggingFaceH4/MATH-500", None): (
        lambda n: {**answered(n), "subject": "Algebra", "level": 1},
        ("test",),
    ),
    ("EleutherAI/hendrycks_math", "algebra"): (
        lambda n: {**maths(n), "level": "Level 1", "type": "Algebra"},
        ("train", "test"),
    ),
    ("HuggingFaceH4/aime_2024", None): (
        answered,
        ("train",),
    ),
    ("AI-MO/aimo-validation-aime", None): (
        answered,
        ("train",),
    ),
    ("math-ai/aime25", None): (
        lambda n: {"problem": maths(n)["problem"], "answer": str(2 * n + 1)},
        ("test",),
    ),
    ("Idavidrein/gpqa", "gpqa_diamond"): (gpqa, ("train",)),
    ("cais/mmlu", "all"): (mmlu, ("test", "validation", "dev", "auxiliary_train")),
    ("TIGER-Lab/MMLU-Pro", None): (mmlu_pro, ("test", "validation")),
    ("allenai/ai2_arc", "ARC-Challenge"): (arc, ("train", "test", "validation")),
    ("google/IFEval", None): (ifeval, ("train",)),
    ("openai/openai_humaneval", None): (humaneval, ("test",)),
    ("google-research-datasets/mbpp", None): (mbpp, ("train", "test", "validation", "prompt")),
    ("google-research-datasets/mbpp", "sanitized"): (sanitized_mbpp, ("train", "test")),
    ("nvidia/OpenMathInstruct-2", None): (
        lambda n: {
            "problem": maths(n)["problem"],
            "generated_solution": maths(n)["solution"],
            "expected_answer": str(2 * n + 1),
            "problem_source": "augmented_math",
        },
        ("train", "train_1M"),
    ),
    ("BytedTsinghua-SIA/DAPO-Math-17k", None): (dapo, ("train",)),
    ("open-r1/OpenR1-Math-220k", None): (openr1, ("train",)),
    ("zwhe99/DeepMath-103K", None): (
        lambda n: {
            "question": maths(n)["problem"],
            "final_answer": str(2 * n + 1),
            "topic": "Algebra",
            "r1_solution_1": maths(n)["solution"],
        },
        ("train",),
    ),
    ("HuggingFaceH4/ultrafeedback_binarized", None): (
        ultrafeedback,
        ("train_prefs", "test_prefs", "train_sft"),
    ),
}
"""By name and configuration: what makes row n, and the splits."""


def hub(folder: Path, monkeypatch: pytest.MonkeyPatch, *, rows: int = 4) -> None:
    """Have `datasets.load_dataset` read samples from Parquet files in a folder, for these names."""

    def load_dataset(name: str, configuration: str | None = None, **options: Any) -> Any:
        if (name, configuration) not in SAMPLES:
            raise ValueError(f"Config name is missing, or no set {name} ({configuration})")
        make, splits = SAMPLES[name, configuration]
        split = options.pop("split")
        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
        path = folder / f"{name.replace('/', '_')}-{configuration}-{split}.parquet"
        if not path.exists():
            datasets.Dataset.from_list([make(n) for n in range(rows)]).to_parquet(path)
        options["data_files"] = options.get("data_files") or str(path)
        return LOAD("parquet", split="train", cache_dir=str(folder / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
