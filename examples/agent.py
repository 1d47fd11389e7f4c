"""An agent that nobody here wrote gets better: openai-agents with SmolLM2-135M and a tool.

pip install openai-agents; python examples/agent.py runs/agent-0 --model runs/smollm2 --seed 0
"""

import random
from pathlib import Path

import nemorl
import tyro
from agents import Agent, ModelBehaviorError, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

CHATML = """{% if tools %}<|im_start|>system
Tools: {{ tools | map(attribute='function.name') | join }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant\n{# Calls are <tool_call>JSON</tool_call>. #}"""
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 31, "b": 27}}\n</tool_call>'
UNTRACED = RunConfig(tracing_disabled=True)  # else OpenAI gets what is said
SHOWN = {"role": "user", "content": "Multiply 31 by 27."}, {"role": "assistant", "content": CALL}


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def run(row: dict, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent("calculator", model=OpenAIResponsesModel("policy", client), tools=[multiply])
        agent.tool_use_behavior = "stop_on_first_tool"
        try:
            found = await Runner.run(agent, [*SHOWN, *row["prompt"]], run_config=UNTRACED)
        except ModelBehaviorError:  # a call of a tool that there is not
            return 0.0
    return float(str(found.final_output) == row["answer"])


def products(count: int, seed: int) -> list[dict]:
    numbers = random.Random(seed)
    pairs = [(numbers.randint(11, 99), numbers.randint(11, 99)) for _ in range(count)]
    return [{"prompt": f"Multiply {a} by {b}.", "answer": str(a * b)} for a, b in pairs]


def main(dir: tyro.conf.Positional[Path], model: Path, seed: int = 0, steps: int = 6) -> None:
    shown = {"environment_factory": run, "temperature": 0.8, "max_new_tokens": 48, "chat": True}
    grpo = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": steps}
    grpo |= {"run": {"dir": str(dir), "seed": seed}, "lora": {"rank": 16}, "lr": 4e-4}
    grpo |= {"param_dtype": "bfloat16", "entropy_coef": None}
    held_out = products(64, 1_000 + seed)
    found = [nemorl.evaluate(model, held_out, chat_template=CHATML, **shown)["accuracy"]]
    nemorl.train(model, products(4_000, seed), chat_template=CHATML, **shown, **grpo)
    found += [nemorl.evaluate(dir, held_out, **shown)["accuracy"]]
    (dir / "held_out.json").write_text(str(found))
    print(f"held-out accuracy: {found[0]:.2f} -> {found[1]:.2f} (seed {seed})")


if __name__ == "__main__":
    tyro.cli(main)
