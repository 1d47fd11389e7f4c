"""Sliding puzzles: their laws, rows of them, and episodes of a scripted model."""

import asyncio
from collections import deque
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.data.datasets import load_rows
from nemorl.data.sliding_puzzle import (
    Board,
    boards,
    distances,
    moves,
    optimal_moves,
    read_board,
    shown,
)
from nemorl.rollout.answers import ENVIRONMENTS
from nemorl.rollout.environments import make_environment
from nemorl.rollout.environments.sliding_puzzle import SlidingPuzzle
from nemorl.runtime.cli.api import make_config
from nemorl.runtime.cli.inference import evaluate
from nemorl.runtime.start.registry import require_names
from nemorl.user_code import function_of
from tests.examples import load_example, run_example
from tests.rollout.environments.test_tools import TOKENIZER, played

OPPOSITE = {"U": "D", "D": "U", "L": "R", "R": "L"}
ALL = {size: list(distances(size)) for size in (2, 3)}
BOARDS = st.sampled_from(ALL[2]) | st.sampled_from(ALL[3])


def even(board: Board) -> bool:
    """Whether an even number of swaps sorts the tiles, the gap last."""
    order, swaps = [tile or len(board) for tile in board], 0
    for place in range(len(order)):
        while order[place] != place + 1:
            other = order[place] - 1
            order[place], order[other] = order[other], order[place]
            swaps += 1
    return swaps % 2 == 0


def gap_away(board: Board) -> int:
    """How many places the gap is from the last corner."""
    size = int(len(board) ** 0.5)
    return sum(size - 1 - place for place in divmod(board.index(0), size))


@given(BOARDS)
def test_a_move_and_its_reverse_are_nothing(board):
    after = moves(board)
    assert {2, 3, 4} >= {len(after)} and len({*after.values()}) == len(after)
    for move, other in after.items():
        assert moves(other)[OPPOSITE[move]] == board
        tile = other[board.index(0)]
        step = board.index(0) - board.index(tile)
        size = int(len(board) ** 0.5)
        assert step == {"U": -size, "D": size, "L": -1, "R": 1}[move]


@given(BOARDS)
def test_a_solution_solves_and_is_shortest(board):
    way = optimal_moves(board)
    assert len(way) == distances(int(len(board) ** 0.5))[board]
    for move in way:
        board = moves(board)[move]
    assert board == (*range(1, len(board)), 0)


@cache
def from_board(board: Board) -> dict[Board, int]:
    """Distances from any board, by a search of its own."""
    found, queue = {board: 0}, deque([board])
    while queue:
        board = queue.popleft()
        for after in moves(board).values():
            if after not in found:
                found[after] = found[board] + 1
                queue.append(after)
    return found


@pytest.mark.parametrize("board", [ALL[2][-1], ALL[3][1000]])
def test_distances_are_those_of_a_search_from_the_other_end(board):
    size = int(len(board) ** 0.5)
    found = from_board(board)
    assert found.keys() == distances(size).keys()
    assert found[(*range(1, size**2), 0)] == distances(size)[board]


@given(st.sampled_from([4, 9]).flatmap(lambda count: st.permutations(range(count))))
def test_half_of_all_orders_are_solvable(order):
    board = tuple(order)
    possible = board in distances(int(len(board) ** 0.5))
    assert possible == (even(board) == (gap_away(board) % 2 == 0))


def test_known_numbers():
    assert [len(ALL[size]) for size in (2, 3)] == [12, 181_440]
    assert [max(distances(size).values()) for size in (2, 3)] == [6, 31]


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 5))
def test_boards_have_the_moves_that_are_asked_for(most, fewer, seed):
    least = max(1, most - fewer)
    found = {
        split: boards("3x3", split=split, most=most, least=least, seed=seed, size=10**6)
        for split in ("train", "validation")
    }
    train, validation = map(set, found.values())
    away = distances(3)
    assert {least <= away[board] <= most for board in train | validation} == {True}
    assert not train & validation
    assert len(train | validation) == sum(least <= n <= most for n in away.values())
    again = boards("3x3", split="train", most=most, least=least, seed=seed, size=5)
    assert again == found["train"][:5]


def test_rows():
    rows, others = (load_rows("sliding_puzzle:2x2", split=s) for s in ("train", "validation"))
    assert (len(rows), len(others)) == (8, 3)
    assert sorted(row["optimal"] for row in (*rows, *others)) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    for row in (*rows, *others):
        assert row["prompt"].endswith(f"R (right).\n\n{row['board']}")
    rows = load_rows("sliding_puzzle:3x3?least=4&most=4&size=9&seed=2", split="train")
    assert len(rows) == 9 and {row["optimal"] for row in rows} == {4}
    assert rows != load_rows("sliding_puzzle:3x3?least=4&most=4&size=9", split="train")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sliding_puzzle:4x4", "sliding_puzzle must be 2x2 or 3x3, but it is '4x4'"),
        ("sliding_puzzle:2x2?moves=3", "unexpected keyword argument 'moves': change the setting"),
        ("sliding_puzzle:2x2?least=9", "holds no rows"),
    ],
)
def test_wrong_sources(source, message):
    with pytest.raises(ValueError, match=message):
        load_rows(source, split="train")


SOLVED = "1 2\n3 0"
ROW = {"board": "0 1\n3 2", "optimal": 2}
"""L and U solve it."""


def script(*answers: str):
    """A model that gives these answers in turn, the last one again and again."""
    return lambda prompt: answers[min(prompt.count("<|im_start|>assistant") - 1, len(answers) - 1)]


def test_the_shortest_solution_is_rewarded():
    found = played(make_environment(SlidingPuzzle), script("I move it Left.", "L or rather U"), ROW)
    assert found.rewards.tolist() == [1.0] * 2 and found.answers == ["LU"] * 2
    assert found.metrics == {"solved": 1.0, "illegal_moves": 0.0, "moves_over_optimal": 0.0}
    assert found.conversations[0].outcome.turn_rewards == [0.0, 1.0]
    assert not found.conversations[0].outcome.truncated


def test_what_is_not_possible_or_no_move_is_said_and_counted():
    answers = script("R", "what?", "", "LU", "L", "R", "left", "up")
    limited = played(make_environment(SlidingPuzzle), answers, ROW)
    assert limited.num_turns.tolist() == [6] * 2, "2 · 2 + 2 turns"
    assert limited.rewards.tolist() == [0.0] * 2 and limited.truncated.all()
    assert limited.metrics == {"solved": 0.0, "illegal_moves": 4.0}
    found = played(make_environment(SlidingPuzzle), answers, ROW, max_turns=9)
    assert found.rewards.tolist() == [1.0] * 2 and found.answers == ["LRLU"] * 2
    assert found.metrics == {"solved": 1.0, "illegal_moves": 4.0, "moves_over_optimal": 2.0}
    last = TOKENIZER.decode(list(found.conversations[0].turns[-1].prompt))
    assert "Not possible: R. Possible: U, L\n0 1\n3 2" in last
    assert last.count("Not possible: no move. Possible: U, L\n0 1\n3 2") == 3
    assert "1 0\n3 2" in last and SOLVED not in last


class Strict(SlidingPuzzle):
    penalty = 0.25


def test_a_penalty_for_each_impossible_move():
    found = played(make_environment(Strict), script("R", "so", "L", "U"), ROW)
    assert found.rewards.tolist() == [0.5] * 2
    assert found.conversations[0].outcome.turn_rewards == [-0.25, -0.25, 0.0, 1.0]


def test_calls_after_the_end():
    puzzle = SlidingPuzzle()
    puzzle.reset([1, 2, 0, 3])
    assert asyncio.run(puzzle.step("L")).done
    with pytest.raises(ValueError, match=r"board must be unsolved, .*: reset"):
        asyncio.run(puzzle.step("R"))


@pytest.mark.parametrize(
    "board", [None, "", SOLVED, "2 1\n3 0", "1 2 3", "1 1\n2 0", shown((*range(1, 16), 0))]
)
def test_rows_that_are_no_puzzle_are_refused(board):
    environment = make_environment(SlidingPuzzle)
    environment.check([ROW])
    with pytest.raises(ValueError, match="row 2: board must be 2x2 or 3x3, solvable and not"):
        environment.check([ROW, {} if board is None else {"board": board}])


def test_environments_have_names():
    for name, place in ENVIRONMENTS.items():
        require_names(make_config("grpo", rollout={"environment": name}))
        assert make_environment("exact_match", environment=name, chosen=False).kind is function_of(
            place, ""
        )
    for name, hint in (("sliding_puzle", "; did you mean sliding_puzzle[?]"), ("chess", "$")):
        with pytest.raises(ValueError, match=f"environment must be .*sliding_puzzle.*Class{hint}"):
            require_names(make_config("grpo", rollout={"environment": name}))


def test_an_evaluation_gives_the_share_solved(tmp_path):
    load_example("puzzle").save_model(tmp_path / "model", seed=0)
    found = evaluate(
        tmp_path / "model",
        "sliding_puzzle:2x2",
        environment_factory="sliding_puzzle",
        prompt_template="{board}",
        validation_split="train",
        **{"max_new_tokens": 1, "n": 8, "temperature": 1.0, "by": "optimal"},
    )
    answers = found["answers"]
    assert len(answers) == 64 and 0 < found["reward"] == found["accuracy"] < 0.5
    for answer in answers:
        board = read_board(answer["prompt"])
        for move in answer.get("extracted_answer", ""):
            board = moves(board)[move]
        assert answer["reward"] == answer["correct"] == (distances(2)[board] == 0)
    assert {line["category"] for line in found["summaries"]} == {None, "1", "2", "3", "4", "5"}


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_example("puzzle.py", "--size", "3", "--steps", "1") == 0
    assert "3x3, of boards held out and others: solved [0." in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_learns_from_nothing(tmp_path):
    before, after = load_example("puzzle").main(steps=25, dir=str(tmp_path / "run"))[1::2]
    assert before < 0.2
    assert after > before + 0.4
