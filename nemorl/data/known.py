"""Known data sets of the hub: their splits, columns, prompts, rewards and categories."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Any

from nemorl.data.rows import Row

BOXED = "{prompt}\n\nReason step by step, and put your final answer within \\boxed{{}}."
LETTER = '{prompt}\n\nThink step by step, then end with a line "Answer: " and the right letter.'
CODE = "Write this Python function, all of it, in one code block.\n\n{prompt}"
BEGUN = CODE.replace("{prompt}", "```python\n{prompt}\n```")


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """What holds for a data set where the settings have their defaults."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our names of columns, and the set's."""
    build: Callable[[Row], Mapping[str, Any]] | None = None
    """Makes more columns of a row."""
    template: str | None = None
    reward: str | None = None
    configuration: str = ""
    train: str = "train"
    validation: str = "test"
    category: str | None = None
    """The column of categories."""


def known_set(source: Any) -> KnownSet | None:
    """Return what is known of a source: None unless it is a known name of the hub.

    >>> known_set("openai/gsm8k").reward, known_set("rows.jsonl")
    ('last_number', None)
    """
    if not isinstance(source, str) or Path(source).exists():
        return None
    return KNOWN.get(source.partition(":")[0])


def as_known(row: Row, known: KnownSet, *, given: Collection[str] = ()) -> Row:
    """Return a row with our columns besides its own, but for the `given` ones.

    >>> as_known(Row({"question": "1+1", "answer": "#### 2"}), KNOWN["openai/gsm8k"])["prompt"]
    '1+1'
    """
    try:
        found = {ours: row[own] for ours, own in known.columns.items() if ours not in given}
        if known.build is not None and "prompt" not in given:
            found |= {k: value for k, value in known.build(row).items() if k not in given}
    except KeyError as error:
        raise ValueError(
            f"{row.origin} must have the column {error} (docs/evaluation.md), but has"
            f" {', '.join(row)}: name its columns (data.prompt_column, data.answer_column)"
        ) from None
    return row.but(**found)


def lettered(question: str, options: Sequence[str], right: int) -> dict[str, str]:
    """Return a question with options as a prompt, and the letter of the right one as the answer.

    >>> lettered("1+1?", ["3", "2"], 1)
    {'prompt': '1+1?\\n\\nA. 3\\nB. 2', 'answer': 'B'}
    """
    lines = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, options, strict=False)]
    return {"prompt": "\n".join([f"{question}\n", *lines]), "answer": ascii_uppercase[right]}


def _gpqa(row: Row) -> dict[str, str]:
    texts = [row["Correct Answer"], *(row[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
    order = Random(row["Question"]).sample(range(4), 4)  # the same in every run
    options = [texts[place].strip() for place in order]
    return lettered(row["Question"].strip(), options, order.index(0))


def _arc(row: Row) -> dict[str, str]:
    choices = row["choices"]
    return lettered(row["question"], choices["text"], choices["label"].index(row["answerKey"]))


def _mbpp(row: Row) -> dict[str, Any]:
    task = row["text"] if "text" in row else row["prompt"]  # of the sanitized ones
    first = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return {
        "prompt": "\n".join([f"{task}\n\nIt must pass these tests:\n", *row["test_list"]]),
        "answer": [f"{first}\n{test}" if first else test for test in row["test_list"]],
    }


def _maths(answer: str = "answer", *, prompt: str = "problem", **others: Any) -> KnownSet:
    columns = {"prompt": prompt, "answer": answer, "response": others.pop("response", "")}
    columns = {ours: own for ours, own in columns.items() if own}
    return KnownSet(columns=columns, **{"reward": "math", "template": BOXED, **others})


def _choices(build: Callable[[Row], dict[str, str]], **others: Any) -> KnownSet:
    return KnownSet(build=build, template=LETTER, reward="choice", **others)


KNOWN: dict[str, KnownSet] = {
    "openai/gsm8k": KnownSet(
        columns={"prompt": "question", "response": "answer"},
        reward="last_number",
        configuration="main",
    ),
    "HuggingFaceH4/MATH-500": _maths(category="subject"),
    "EleutherAI/hendrycks_math": _maths("solution", response="solution", category="type"),
    "HuggingFaceH4/aime_2024": _maths(validation="train"),
    "AI-MO/aimo-validation-aime": _maths(validation="train"),
    "math-ai/aime25": _maths(),
    "Idavidrein/gpqa": _choices(
        _gpqa,
        configuration="gpqa_diamond",
        validation="train",
        category="High-level domain",
    ),
    "cais/mmlu": _choices(
        lambda row: lettered(row["question"], row["choices"], row["answer"]),
        configuration="all",
        train="auxiliary_train",
        category="subject",
    ),
    "TIGER-Lab/MMLU-Pro": _choices(
        lambda row: lettered(row["question"], row["options"], row["answer_index"]),
        train="validation",
        category="category",
    ),
    "allenai/ai2_arc": _choices(_arc, configuration="ARC-Challenge"),
    "google/IFEval": KnownSet(reward="ifeval", validation="train"),
    "openai/openai_humaneval": KnownSet(columns={"answer": "test"}, template=BEGUN, reward="code"),
    "google-research-datasets/mbpp": KnownSet(
        columns={"response": "code"}, build=_mbpp, template=CODE, reward="code"
    ),
    "nvidia/OpenMathInstruct-2": _maths(
        "expected_answer", response="generated_solution", category="problem_source"
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": KnownSet(
        build=lambda row: {"answer": row["reward_model"]["ground_truth"]}, reward="math"
    ),
    # No template: SFT reads its messages, which one would replace.
    "open-r1/OpenR1-Math-220k": _maths(template=None, category="problem_type"),
    "zwhe99/DeepMath-103K": _maths(
        "final_answer", prompt="question", response="r1_solution_1", category="topic"
    ),
    "HuggingFaceH4/ultrafeedback_binarized": KnownSet(train="train_prefs", validation="test_prefs"),
}
"""By name; `NAME:CONFIGURATION` has another configuration."""
