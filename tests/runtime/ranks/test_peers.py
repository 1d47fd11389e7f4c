"""What the processes of one torchrun know of each other, without any."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemorl.runtime.ranks.peers import _lives, _namespace


def test_who_lives():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _lives(child.pid) and _lives(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not _lives(child.pid), "a zombie"
    child.wait()
    assert not _lives(child.pid)


def test_a_process_without_a_descriptor_left_takes_nobody_for_dead(monkeypatch: pytest.MonkeyPatch):
    def no_descriptor(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", no_descriptor)
    assert _lives(1)


def test_process_ids_mean_the_same_within_a_namespace():
    namespace, machine = _namespace()
    assert namespace.startswith("pid:[") and len(machine.strip()) == 36
