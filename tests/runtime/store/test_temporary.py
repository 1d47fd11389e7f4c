"""What kills leave in the temporary folder: whose it is, and when it goes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.runtime.store.files import MARK, claim, sweep_temporary, temporary_folder

HOLD = """
import sys
from pathlib import Path
from nemorl.runtime.store.files import claim, temporary_folder
if len(sys.argv) > 1:
    claim(Path(sys.argv[1]))
    print(sys.argv[1], flush=True)
    sys.stdin.read()
with temporary_folder() as folder:
    (folder / "vllm_dist_1").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return tmp_path


def owner(*arguments: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    command = [sys.executable, "-c", HOLD, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_leaves_goes_with_the_next_start_and_not_before(temporary: Path):
    session = temporary / "nemorl-ray"
    session.mkdir()
    started = [owner(), owner(str(session))]
    sweep_temporary()
    assert all((folder / MARK).exists() for _, folder in started), "of the living"
    for process, _ in started:
        process.kill()
        process.communicate()
    with temporary_folder() as own:
        assert list(temporary.glob("*/*")) == [own / MARK]
    assert not own.exists()


def test_an_owner_that_inherits_the_claim_keeps_the_folder(temporary: Path):
    folder = temporary / "nemorl-shared"
    folder.mkdir()
    descriptor = claim(folder)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    os.close(descriptor)
    sweep_temporary()
    assert folder.exists()
    heir.kill()
    heir.wait()
    sweep_temporary()
    assert not folder.exists()


def dead(folder: Path) -> Path:
    folder.mkdir(parents=True)
    os.close(claim(folder))
    return folder


def test_only_what_is_provably_ours_is_removed(temporary: Path):
    (temporary / "nemorl-results").mkdir()
    (temporary / "vllm_dist_1").touch()
    (temporary / "ray" / "session_2").mkdir(parents=True)
    link = temporary / "nemorl-link"
    link.symlink_to(dead(temporary / "elsewhere" / "nemorl-linked"))
    kept = [*temporary.rglob("*")]
    if os.geteuid() == 0:
        for index, name in enumerate(("", MARK)):
            foreign = dead(temporary / f"nemorl-foreign{index}")
            os.chown(foreign / name, 12345, -1)
            kept += [foreign, foreign / MARK]
    fifo = temporary / "nemorl-fifo"
    fifo.mkdir()
    os.mkfifo(fifo / MARK)
    mine = dead(temporary / "nemorl-mine")
    sweep_temporary()
    assert not mine.exists()
    assert all(path.exists() for path in kept)
