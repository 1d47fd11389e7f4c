"""A small model learns to multiply with a calculator: python examples/tools.py [--seed 1]

SFT shows a model with random weights how a call is written: half of the demonstrations guess, 7 in
20 ask the calculator for another product, 3 in 20 are right. GRPO rewards right answers alone.
"""

import random
import re

import nemorl
import tyro
from nemorl.rollout.environments.toolbox import Calculator
from nemorl.rollout.environments.tools import schemas_of, tools_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast, set_seed

CALL, END = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
TOKENS = ["<eos>", "?", "<user>", "<assistant>", "<tool>", CALL, END, "calculate", " times "]
TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}
{{- '<' + m.role + '>' + m.content + (eos_token if m.role == 'assistant' else '') }}{% endfor %}
{{- '<assistant>' if add_generation_prompt }}{# calls are as Hermes', in <tool_call> #}"""


def student():
    words = models.WordLevel({t: i for i, t in enumerate([*TOKENS, *"*0123456789"])}, "?")
    plain, split = Tokenizer(words), Regex("|".join([*map(re.escape, TOKENS), "."]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Split(split, "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="?")
    sizes = {"vocab_size": 20, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Olmo2Config(**sizes, num_attention_heads=4, tie_word_embeddings=True, eos_token_id=0)
    return {"model": Olmo2ForCausalLM(config), "tokenizer": tokenizer, "chat_template": TEMPLATE}


def row(rng):
    a, b, guess = rng.randint(320, 999), rng.randint(320, 999), rng.randint(10**5, 10**6 - 1)
    first = rng.choices([None, b, a], [10, 7, 3])[0]
    more = [f"{CALL}{first}*{b}{END}", str(first * b), str(first * b)] if first else [str(guess)]
    said, roles = [f"{a} times {b}", *more], ["user", "assistant", "tool", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return {"messages": messages, "answer": str(a * b), "tools": schemas_of(tools_of(Calculator))}


def main(seed: int = 0, sft: int = 400, grpo: int = 45):
    set_seed(seed)
    rng, given = random.Random(seed), {**student(), "seed": seed}
    rows = [row(rng) for _ in range(4000)]
    shown = {"algorithm": "sft", "lr": 4e-3, "max_num_steps": sft, "dir": f"runs/tools-{seed}/sft"}
    nemorl.train(**given, dataset=rows[200:], train_global_batch_size=64, **shown)
    asked = [{"prompt": each["messages"][:1], "answer": each["answer"]} for each in rows]
    data = {"dataset": asked[200:], "validation": asked[:200], "val_at_start": True}
    sizes = {"num_prompts_per_step": 16, "num_generations_per_prompt": 8, "max_new_tokens": 16}
    led = {"environment_factory": Calculator, "lr": 1e-3, "dir": f"runs/tools-{seed}/grpo"}
    history = nemorl.train(**given, **data, **sizes, **led, max_num_steps=grpo).history
    before, after = (line["accuracy"] for line in history if line["phase"] == "validation")
    print(f"held-out greedy accuracy: {before:.2f} -> {after:.2f}")
    return history


if __name__ == "__main__":
    tyro.cli(main)
