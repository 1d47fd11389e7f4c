"""Code as a task: programs, tests for them, and the reward `code` in a sandbox.

    python examples/code_reward.py
    nemorl grpo … --data.train code.jsonl --data.answer-column tests --reward code

Right solutions and wrong ones are judged, also those that try to pass without solving anything:
run this with reference solutions of your own data before you train on it. Each of them must get 1.
"""

from nemorl.rollout.environments import make_environment
from nemorl.rollout.sandbox import check_sandbox

HEAD = 'def largest(xs: list) -> int:\n    """Return the largest of some numbers."""\n'
ROWS = [
    {  # asserts, as in MBPP
        "prompt": "Write a function twice(x).",
        "answer": ["assert twice(2) == 4", "assert twice('a') == 'aa'"],
    },
    {  # a check of a candidate, whose prompt begins it, as in HumanEval
        "prompt": HEAD,
        "answer": "def check(candidate):\n    assert candidate([-1, -3]) == -1",
        "entry_point": "largest",
    },
    {  # stdin and stdout, as in programming contests
        "prompt": "Add two integers, one a line.",
        "answer": [{"input": "1\n2\n", "output": "3"}, {"input": "4\n-4\n", "output": "0"}],
    },
]
RIGHT = [
    "Like this:\n```python\ndef twice(x):\n    return 2 * x\n```",
    "    return max(xs)\n",
    "```python\nprint(int(input()) + int(input()))\n```",
]
WRONG = {
    "wrong": ["def twice(x):\n    return 4", "    return xs[1]\n", "print(3)"],
    "exits at once": ["import os; os._exit(0)"] * 3,
    "equals everything": [
        "class Yes(int):\n    __eq__ = lambda *_: True\ndef twice(x): return Yes()",
        "    class Yes(int):\n        __eq__ = lambda *_: True\n    return Yes()\n",
        "print('ok', 'passed', True)",
    ],
    "never ends": ["while True: pass", "    while True: pass\n", "input(); input(); input()"],
}


def main() -> None:
    environment = make_environment("code", settings={"limits": {"cpu": 1}})
    environment.check(ROWS)
    check_sandbox()
    for name, programs in {"right": RIGHT, **WRONG}.items():
        logs = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": program}]
            for row, program in zip(ROWS, programs, strict=True)
        ]
        print(f"{name}: {environment.step(logs, ROWS).rewards}")


if __name__ == "__main__":
    main()
