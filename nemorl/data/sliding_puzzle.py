"""Sliding puzzles: a board is a tuple of its tiles, row by row, with 0 for the gap."""

import random
import re
import zlib
from functools import cache
from math import isqrt
from typing import Any

from nemorl.checks import require

Board = tuple[int, ...]
SIZES = {"2x2": 2, "3x3": 3}


def moves(board: Board) -> dict[str, Board]:
    """Return the board after each possible move: U, D, L or R, where a tile goes.

    >>> moves((1, 2, 3, 0))
    {'D': (1, 0, 3, 2), 'R': (1, 2, 0, 3)}
    """
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
    """Return how many moves from solved each solvable board is, at least.

    >>> len(distances(2)), max(distances(2).values())
    (12, 6)
    """
    queue = [(*range(1, size**2), 0)]
    found = {queue[0]: 0}
    for board in queue:  # which grows
        for after in moves(board).values():
            if after not in found:
                found[after] = found[board] + 1
                queue.append(after)
    return found


def optimal_moves(board: Board) -> str:
    """Return a shortest solution of a solvable board.

    >>> optimal_moves((0, 1, 3, 2))
    'LU'
    """
    away, made = distances(isqrt(len(board))), ""
    while away[board]:
        move, board = min(moves(board).items(), key=lambda item: away[item[1]])
        made += move
    return made


def boards(
    shape: str, *, split: str, size: int = 1000, most: int = 31, least: int = 1, seed: int = 0
) -> list[Board]:
    """Return up to `size` boards that are `least` to `most` moves from solved, shuffled.

    A board is of the split "validation", as a fifth of them are, or of "train", always.

    >>> boards("2x2", split="validation", most=2)
    [(0, 1, 3, 2)]
    """
    require(shape in SIZES, "sliding_puzzle", f"must be {' or '.join(SIZES)}", shape, "choose one")
    held_out = split == "validation"
    found = [
        board
        for board, away in distances(SIZES[shape]).items()
        if least <= away <= most and (zlib.crc32(bytes(board)) % 5 == 0) == held_out
    ]
    random.Random(seed).shuffle(found)
    return found[:size]


def shown(board: Board) -> str:
    """Return a board as text.

    >>> shown((1, 2, 3, 0))
    '1 2\\n3 0'
    """
    size = isqrt(len(board))
    return "\n".join(" ".join(map(str, board[i : i + size])) for i in range(0, len(board), size))


def read_board(text: Any) -> Board:
    """Return a board from its text, or a list. Raises: ValueError if solved or unsolvable.

    >>> read_board("1 2\\n0 3")
    (1, 2, 0, 3)
    """
    board = tuple(map(int, re.findall(r"\d+", str(text))))
    size = isqrt(len(board))
    fits = size in SIZES.values() and distances(size).get(board, 0) > 0
    must = f"must be {' or '.join(SIZES)}, solvable and not solved"
    require(fits, "board", must, text, "see docs/puzzle.md")
    return board
