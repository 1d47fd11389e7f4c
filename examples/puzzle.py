"""A model that knows nothing learns sliding puzzles: 2x2, or with --size 3 some of 3x3."""

import random
import re
import shutil
import zlib
from functools import cache
from math import isqrt
from pathlib import Path

import nemorl
import torch
import tyro
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

Board = tuple[int, ...]  # the tiles, row by row, with 0 for the gap


def moves(board: Board) -> dict[str, Board]:
    """Return the board after each possible move: U, D, L or R, where a tile goes."""
    size, gap, found = isqrt(len(board)), board.index(0), {}
    for move, tile in zip("UDLR", (gap + size, gap - size, gap + 1, gap - 1), strict=True):
        aligned = tile % size == gap % size or tile // size == gap // size
        if aligned and 0 <= tile < len(board):
            after = [*board]
            after[gap], after[tile] = after[tile], 0
            found[move] = tuple(after)
    return found


@cache
def distances(size: int) -> dict[Board, int]:
    """Return how many moves from solved each solvable board is, at least."""
    queue = [(*range(1, size**2), 0)]
    found = {queue[0]: 0}
    for board in queue:  # which grows
        for after in moves(board).values():
            if after not in found:
                found[after] = found[board] + 1
                queue.append(after)
    return found


def shown(board: Board) -> str:
    size = isqrt(len(board))
    return "\n".join(" ".join(map(str, board[i : i + size])) for i in range(0, len(board), size))


def rows(size: int, most: int, *, held_out: bool) -> list[dict[str, str]]:
    """Return up to 1,000 boards at most so many moves from solved; a fifth of all is held out."""
    found = [
        board
        for board, away in distances(size).items()
        if 1 <= away <= most and (zlib.crc32(bytes(board)) % 5 == 0) == held_out
    ]
    random.Random(0).shuffle(found)
    return [{"prompt": shown(board)} for board in found[:1000]]


class SlidingPuzzle:
    """A move in each turn, and reward 1 once the board is solved; what is no move costs `penalty`:
    the model begins with tokens that are none at all.
    """

    penalty = 0.1

    def reset(self, prompt: str) -> None:
        self.board = tuple(map(int, re.findall(r"\d+", prompt)))
        self.away = distances(isqrt(len(self.board)))
        self.max_turns = 2 * self.away[self.board] + 2

    async def step(self, response: str) -> nemorl.TurnResult:  # in no thread: it takes no time
        found, names = moves(self.board), re.findall("[UDLR]", response)
        legal = bool(names) and names[-1] in found
        self.board = found[names[-1]] if legal else self.board
        solved = self.away[self.board] == 0
        said = "" if legal else f"Possible: {', '.join(found)}\n"
        reward = solved - self.penalty * (not legal)
        return nemorl.TurnResult(
            observation=said + shown(self.board),
            reward=reward,
            done=solved,
            metrics={"solved": float(solved)},
        )


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


def solved(model: Path, *sets: list[dict[str, str]]) -> list[float]:
    """Return the share solved, of 8 samples for each board, of each set of boards."""
    given = {"max_new_tokens": 1, "n": 8, "temperature": 1.0}
    found = [
        nemorl.evaluate(model, each, environment_factory=SlidingPuzzle, **given) for each in sets
    ]
    return [round(each["metrics"]["solved"], 2) for each in found]


def main(size: int = 2, seed: int = 0, steps: int = 50, dir: str = "runs/puzzle") -> list[float]:
    """Return the shares solved before and after training."""
    shutil.rmtree(dir, ignore_errors=True)
    save_model(model := Path(dir, "model"), seed)
    most, turns, entropy = {2: (6, None, 0.02), 3: (4, 4, 0.05)}[size]
    others, train = (rows(size, most, held_out=held_out) for held_out in (True, False))
    before = solved(model, others, train)
    result = nemorl.train(
        model, train, environment_factory=SlidingPuzzle, max_new_tokens=1,
        num_prompts_per_step=8, num_generations_per_prompt=8, max_num_steps=steps, lr=2e-3,
        num_updates_per_batch=4, entropy_coef=entropy, reduction="token_mean", discount=0.9,
        max_turns=turns, advantage={"level": "turn"}, run={"dir": f"{dir}/run", "seed": seed},
    )  # fmt: skip
    after = solved(result.paths.hf, others, train)
    print(f"{size}x{size}, of boards held out and others: solved {before} -> {after}")
    return before + after


if __name__ == "__main__":
    tyro.cli(main)
