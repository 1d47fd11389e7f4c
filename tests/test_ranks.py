"""Ranks of tests: what is said of a dead one, and that kept ones rest."""

import multiprocessing as mp
import os

import psutil
import pytest

from tests import ranks
from tests.ranks import run_ranks


def dies_at_once(*_: object) -> None:
    os._exit(3)


def test_a_rank_that_dies_before_its_log_is_open_is_named(monkeypatch: pytest.MonkeyPatch):
    plain = mp.get_context("fork")
    monkeypatch.setattr(ranks.mp, "get_context", lambda _: plain)
    monkeypatch.setattr(ranks, "_serve", dies_at_once)
    with pytest.raises(AssertionError, match="rank 0 died with exit code 3: nothing, before it op"):
        run_ranks(1, os.getpid, process_group=False)


class Unreadable:
    """Cannot be read by who gets it."""

    def __reduce__(self) -> tuple:
        return int, ("no number",)


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_call_says_why():
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*invalid literal for int"):
        run_ranks(1, print, Unreadable(), process_group=False)


@pytest.mark.slow
def test_kept_ranks_are_stopped_between_two_functions():
    """With their process groups, whose threads would poll."""
    ranks._end()  # others' ranks may have been used often enough to end with the next use
    first = run_ranks(2, os.getpid)
    while {psutil.Process(pid).status() for pid in first} != {psutil.STATUS_STOPPED}:
        continue  # a signal arrives when it does
    assert run_ranks(2, os.getpid) == first
