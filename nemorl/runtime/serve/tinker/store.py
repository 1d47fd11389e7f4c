"""What the service keeps on disk.

sessions/ID.json
runs/MODEL/model.json                what it was made with
runs/MODEL/requests/N, answers/N     by seq_id
runs/MODEL/weights/NAME/             a training state: a checkpoint's backend
runs/MODEL/sampler_weights/NAME/     the same of adapters; of a whole model a folder model/
runs/MODEL/restart/                  a training state to go on from after a crash
samplers/SAMPLER/sampler.json        and its requests and answers
"""

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from nemorl.runtime.serve.wire import Json, Refused, demand
from nemorl.runtime.store.files import write_atomically, writing

KINDS = {"weights": "training", "sampler_weights": "sampler"}
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
PATH = re.compile(
    rf"tinker://([0-9a-f]{{32}}:train:\d+)/({'|'.join(KINDS)})/(_\d+|{NAME.pattern})", re.ASCII
)
ABOUT = "tinker.json"
"""In the folder of a saved state."""
LONGEST_TTL = 10 * 366 * 86_400


def date(seconds: float) -> str:
    """Return a time in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def now() -> str:
    """Return the time in ISO 8601."""
    return date(time.time())


def write_json(path: Path, value: Json) -> None:
    """Write a value, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value) + "\n")


@dataclass(eq=False)
class Stream:
    """Requests by number and their answers, each in a file: a verb and a body; J and JSON, or P and
    protobuf.
    """

    folder: Path
    unwritten: dict[int, bytes] = field(default_factory=dict)
    """Answers for which the disk had no room."""

    def add(self, number: int, verb: str, body: bytes) -> bool:
        """Keep a request; return whether it is new. Raises: Refused for another of its number."""
        if found := self.request(number):
            same = found == (verb, body)
            if not same and found[0] == verb and verb.startswith("forward"):
                # Maps in a message have no order.
                one, other = (np.bincount(np.frombuffer(x, np.uint8)) for x in (found[1], body))
                same = np.array_equal(one, other)
            must = f"must be new, but {number} was a request of {found[0]} with another body"
            demand(same, "seq_id", must, "count on")
        if found or self.answer(number) is not None:
            return False
        try:
            self._write("requests", number, verb.encode() + b"\n" + body)
        except OSError as error:
            raise Refused(f"the request can't be kept ({error}): make room", status=422) from error
        return True

    def request(self, number: int) -> tuple[str, bytes] | None:
        """Return a request, if it is kept."""
        verb, line, body = self._read("requests", number).partition(b"\n")
        return (verb.decode(), body) if line else None

    def answer(self, number: int) -> bytes | None:
        """Return an answer, if there is one."""
        return self._read("answers", number) or self.unwritten.get(number)

    def record(self, number: int, answer: bytes) -> None:
        """Keep an answer; in memory where the disk is full."""
        try:
            self._write("answers", number, answer)
        except OSError:
            self.unwritten[number] = answer

    def forget(self, kind: str, *, before: int) -> None:
        """Remove the requests or answers below a number, but what a model was made by."""
        for path in (self.folder / kind).glob("[1-9]*"):
            if int(path.name) < before:
                path.unlink(missing_ok=True)

    def _read(self, kind: str, number: int) -> bytes:
        with suppress(FileNotFoundError):
            return (self.folder / kind / str(number)).read_bytes()
        return b""

    def _write(self, kind: str, number: int, data: bytes) -> None:
        # Not flushed: it outlives the process, if not the machine's power.
        aside = self.folder / kind / f".{number}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(aside.with_name(str(number)))


def failure(error: str, category: str = "user") -> bytes:
    """Return the answer to a request that failed."""
    return b"J" + json.dumps({"error": error, "category": category}).encode()


def category(answer: bytes) -> str | None:
    """Return whose fault a failed answer is; None of any other."""
    return json.loads(answer[1:])["category"] if answer.startswith(b'J{"error"') else None


def folder_of(root: Path, path: str, *kinds: str) -> Path:
    """Return the folder of a tinker:// path. Raises: Refused where it is none."""
    found: Any = PATH.fullmatch(path)
    demand(
        bool(found) and found[2] in (kinds or KINDS),
        "path",
        f"must be tinker://MODEL/{'|'.join(kinds or KINDS)}/NAME, but is {path[:200]!r}",
        "take one that the service returned",
    )
    return root.joinpath("runs", *found.groups())


def path_of(folder: Path) -> str:
    """Return the tinker:// path of a folder."""
    return f"tinker://{'/'.join(folder.parts[-3:])}"


def write_state(
    folder: Path, about: Json, write: Callable[[Path], Any], *, overwrite: bool = True
) -> None:
    """Write a saved state, whole or not at all. Raises: Refused for a taken name, NotWritten."""
    if known := about_of(folder):
        if known["seq_id"] == about["seq_id"]:
            return  # the answer was lost, not the state
        must = f"must be new, but there is a state {folder.name!r}"
        demand(overwrite, "path", must, "name another, or overwrite it")
    aside = folder.with_name(f".{folder.name}.new")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        with writing(f"the state {folder.name}", folder):
            aside.mkdir(parents=True)
            write(aside)
            write_json(aside / ABOUT, about)
            if folder.exists():
                folder.rename(old)
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def about_of(folder: Path) -> Json | None:
    """Return what is known of a saved state; None where there is none, or it has expired."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found: Json = json.loads((folder / ABOUT).read_bytes())
        if (found.get("expires") or math.inf) >= time.time():
            return found
    return None


def write_sampler(folder: Path, about: Json) -> None:
    """Write what a new sampler samples from. Raises: Refused for another's number."""
    path = folder / "sampler.json"
    if not path.exists():
        write_json(path, about)
    same = json.loads(path.read_bytes())["model_path"] == about["model_path"]
    demand(same, "sampling_session_seq_id", "must be new", "count on")


def states(run: Path) -> list[tuple[Path, Json]]:
    """Return a model's saved states that have names, oldest first."""
    found = [
        (path, about)
        for path in run.glob("*weights/[!.]*")
        if (about := about_of(path)) and about["named"]
    ]
    return sorted(found, key=lambda pair: pair[1]["time"])


def sweep(root: Path) -> None:
    """Remove saved states that have expired, and what killed processes left. Not while others
    write.
    """
    for old in (*root.glob("runs/*/.*.old"), *root.glob("runs/*/*/.*.old")):
        if not (folder := old.with_name(old.name[1:-4])).exists():
            old.rename(folder)  # killed between two renames
    for folder in root.glob("runs/*/*weights/*"):
        if folder.name.startswith(".") or not about_of(folder):
            shutil.rmtree(folder, ignore_errors=True)
