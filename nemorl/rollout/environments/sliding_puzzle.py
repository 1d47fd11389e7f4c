"""The sliding puzzle as an environment."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.checks import require
from nemorl.data.rows import for_rows
from nemorl.data.sliding_puzzle import moves, optimal_moves, read_board, shown
from nemorl.rollout.environments.classes import TurnResult

MOVE = re.compile(r"\b(?:[UDLR]|(?i:up|down|left|right))\b")


class SlidingPuzzle:
    """A move in each turn, the last that a response names, and reward 1 once `board` is solved.

    A response without a possible move gets a message, and costs `penalty`.
    """

    penalty = 0.0

    @staticmethod
    def check(rows: Sequence[Mapping[str, Any]]) -> None:
        for_rows(rows, lambda row: read_board(row.get("board")))

    def reset(self, board: Any) -> None:
        self.board = read_board(board)
        self.optimal = len(optimal_moves(self.board))
        self.max_turns = 2 * self.optimal + 2
        self.made, self.illegal = "", 0

    async def step(self, response: str) -> TurnResult:  # in no thread, which would take longer
        require(bool(optimal_moves(self.board)), "board", "must be unsolved", self.board, "reset")
        found, names = moves(self.board), MOVE.findall(response)
        move, said = names[-1][0].upper() if names else "", ""
        if legal := move in found:
            self.board, self.made = found[move], self.made + move
        else:
            self.illegal += 1
            said = f"Not possible: {move or 'no move'}. Possible: {', '.join(found)}\n"
        metrics = {"solved": 0.0, "illegal_moves": float(self.illegal)}
        if solved := not optimal_moves(self.board):
            metrics |= {"solved": 1.0, "moves_over_optimal": len(self.made) - self.optimal}
        return TurnResult(
            observation=said + shown(self.board),
            reward=solved - self.penalty * (not legal),
            done=solved,
            answer=self.made,
            metrics=metrics,
        )
