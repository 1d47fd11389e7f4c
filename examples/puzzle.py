"""A model that knows nothing learns sliding puzzles: 2x2, or with --size 3 some of 3x3."""

import shutil
from pathlib import Path

import nemorl
import torch
import tyro
from nemorl.rollout.environments.sliding_puzzle import SlidingPuzzle
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


class Strict(SlidingPuzzle):
    penalty = 0.1  # the model begins with tokens that are no moves at all


def save_model(folder: Path, seed: int) -> None:
    """Save a Qwen2 of 0.1 M random weights, with a token for each move and each tile."""
    tokens = {token: index for index, token in enumerate(["<end>", *"UDLR012345678"])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[UDLR0-8]"), "removed", invert=True)
    ends = dict.fromkeys(("pad_token", "eos_token", "unk_token"), "<end>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": len(tokens)}
    sizes |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0}
    Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0)).save_pretrained(folder)


def solved(model: Path, source: str) -> list[float]:
    """Return the share solved, of 8 samples for each board: of boards held out, and of others."""
    given = {"environment_factory": "sliding_puzzle", "prompt_template": "{board}"}
    given |= {"max_new_tokens": 1, "n": 8, "temperature": 1.0}
    splits = [given | {"validation_split": split} for split in ("validation", "train")]
    return [round(nemorl.evaluate(model, source, **each)["reward"], 2) for each in splits]


def main(size: int = 2, seed: int = 0, steps: int = 50, dir: str = "runs/puzzle") -> list[float]:
    """Return the shares solved before and after training."""
    shutil.rmtree(dir, ignore_errors=True)
    save_model(model := Path(dir, "model"), seed)
    most, turns, entropy = {2: (6, None, 0.02), 3: (4, 4, 0.05)}[size]
    source = f"sliding_puzzle:{size}x{size}?most={most}"
    before = solved(model, source)
    result = nemorl.train(
        model, source, environment_factory=Strict, prompt_template="{board}", max_new_tokens=1,
        num_prompts_per_step=8, num_generations_per_prompt=8, max_num_steps=steps, lr=2e-3,
        num_updates_per_batch=4, entropy_coef=entropy, reduction="token_mean", discount=0.9,
        max_turns=turns, advantage={"level": "turn"}, run={"dir": f"{dir}/run", "seed": seed},
    )  # fmt: skip
    after = solved(result.paths.hf, source)
    print(f"{size}x{size}, of boards held out and others: solved {before} -> {after}")
    return before + after


if __name__ == "__main__":
    tyro.cli(main)
