"""A model that knows nothing learns to solve sliding puzzles by GRPO over turns (docs/puzzle.md).

python examples/puzzle.py [--seed 1]        2x2
python examples/puzzle.py --size 3          3x3, boards of at most 4 moves
"""

import shutil
from pathlib import Path

import nemorl
import tyro
from nemorl.rollout.environments.sliding_puzzle import SlidingPuzzle


class Strict(SlidingPuzzle):
    penalty = 0.1  # the model begins with tokens that are no moves at all


def save_model(folder: Path, seed: int) -> None:
    """Save a Qwen2 of 0.1 M random weights, with a token for each move and each tile."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokens = {token: index for index, token in enumerate(["<end>", *"UDLR012345678"])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[UDLR0-8]"), "removed", invert=True)
    special = dict.fromkeys(("pad_token", "eos_token", "unk_token"), "<end>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = Qwen2Config(vocab_size=len(tokens), **sizes, **heads, **ends)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def solved(model: Path, source: str, split: str) -> float:
    """Return the share of a split's boards that the model solves, of 8 samples of each."""
    given = {"environment_factory": "sliding_puzzle", "prompt_template": "{board}"}
    sampling = {"n": 8, "temperature": 1.0, "max_new_tokens": 1, "validation_split": split}
    return nemorl.evaluate(model, source, **given, **sampling)["reward"]


def main(size: int = 2, seed: int = 0, steps: int = 50, dir: str = "runs/puzzle") -> list[float]:
    """Train, and return the shares solved before and after: on boards held out, and all others."""
    shutil.rmtree(dir, ignore_errors=True)
    model, splits = Path(dir, "model"), ("validation", "train")
    save_model(model, seed)
    most = 6 if size == 2 else 4
    source = f"sliding_puzzle:{size}x{size}?most={most}"
    before = [solved(model, source, split) for split in splits]
    result = nemorl.train(
        model, source, environment_factory=Strict, prompt_template="{board}", max_new_tokens=1,
        num_prompts_per_step=8, num_generations_per_prompt=8, max_num_steps=steps, lr=2e-3,
        num_updates_per_batch=4, entropy_coef=0.02, reduction="token_mean", discount=0.9,
        max_turns=most, advantage={"level": "turn"}, run={"dir": f"{dir}/run", "seed": seed},
    )  # fmt: skip
    after = [solved(result.paths.hf, source, split) for split in splits]
    for name, was, now in zip(("held out", "others"), before, after, strict=True):
        print(f"{size}x{size}, boards {name}: solved {was:.2f} -> {now:.2f}")
    return [*before, *after]


if __name__ == "__main__":
    tyro.cli(main)
