"""Mathematics as a task: answers that are compared as numbers, fractions, sets and formulas.

    python examples/math_reward.py
    nemorl grpo … --data.train problems.jsonl --reward math

Right answers are judged in other forms than the data has them, then wrong ones. Run this with the
solutions of your own data before you train on it: each of them must get 1.
"""

from nemorl.rollout.environments import make_environment

ROWS = [
    {"prompt": "What is 1/4 + 1/4?", "answer": "\\frac{1}{2}"},
    {"prompt": "Solve x² = 4.", "answer": "\\{-2, 2\\}"},
    {"prompt": "Expand (x + 1)².", "answer": "x^2 + 2x + 1"},
    {"prompt": "Ann has 3 eggs, then twice as many.", "answer": "She has 2 * 3 = 6.\n#### 6"},
]
ANSWERS = {
    "right": ["So it is $\\boxed{0.5}$.", "\\boxed{\\{2, -2\\}}", "$(x+1)^2$", "The answer is 6."],
    "wrong": ["\\boxed{0.25}", "\\boxed{2}", "$x^2 + 1$", "The answer is 9."],
    "without an answer": ["I do not know."] * 4,
    "too long to compute": ["$2^{3^{4^{5^{6}}}}$"] * 4,
}


def main() -> None:
    environment = make_environment("math")
    environment.check(ROWS)
    for name, answers in ANSWERS.items():
        logs = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
            for row, answer in zip(ROWS, answers, strict=True)
        ]
        print(f"{name}: {list(environment.step(logs, ROWS).rewards)}")


if __name__ == "__main__":
    main()
