"""Names that settings have in other libraries (coming_from.toml): refused with ours, or with what
to do where nothing here is like it.
"""

import functools
import re
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from nemorl.checks import closest


@functools.cache
def table() -> dict[str, Any]:
    """Return coming_from.toml, whose head explains it."""
    return tomllib.loads(Path(__file__).with_name("coming_from.toml").read_text(encoding="utf-8"))


@functools.cache
def libraries() -> dict[str, dict[str, str]]:
    """Return for each name of each library a text: a setting of ours first, or "none: "."""
    sentences = {f"none: {name}": f"none: {text}" for name, text in table()["sentences"].items()}
    return {
        library: {
            name: sentences.get(ours, ours)
            for names, ours in rows.items()
            for name in names.split()
        }
        for library, rows in table()["names"].items()
    }


def algorithm_hint(word: str, known: Collection[str]) -> str:
    """Return what to write for an algorithm that is not known here, or what was misspelled."""
    ours = table()["algorithms"].get(word.replace("-", "_"))
    return f"; write {ours}." if ours else closest(word, known)


def settings_in(text: str) -> list[str]:
    """Return what may be keys in a text of the table."""
    if text.startswith("none: "):
        return []
    return re.findall(r"(?:^|(?<=[:,] ))[\w.]+|\w+[._][\w.]+", text)


def advice(
    name: str,
    known: Collection[str],
    *,
    command: str,
    near: Collection[str],
    write: Callable[[str], str] = str,
) -> str:
    """Return the end of an error about a name that no setting has: what it stands for in another
    library, else what was misspelled of `near`, else what its section stands for, else nothing.

    known: our keys that can be written; `write` returns how.
    """
    entry, hint = _entry(name, known), closest(name, near)
    ours = entry and (not settings_in(entry[2]) or _key(entry[2], known))
    if entry and not (hint and (not ours or ("." in name and entry[1] != name))):
        return f": {meaning_of(name, known, command, write)}"
    if hint:
        return hint
    if begun := [key for key in known if "." in name and key.startswith(f"{name}_")]:
        return f"; did you mean {' or '.join(map(write, begun))}?"
    for section in reversed(name.split(".")[:-1]):
        if meaning := meaning_of(section, known, command, write):
            return f": {meaning}"
    return ""


def means_another(name: str, key: str) -> bool:
    """Return whether people who write a setting's last name alone want another setting."""
    found = [names[name] for names in libraries().values() if name in names]
    return bool(found) and not any(_key(ours, [key]) for ours in found)


def meaning_of(
    name: str, known: Collection[str], command: str, write: Callable[[str], str] = str
) -> str:
    """Return a sentence about what a name is here, what to write and the page, if a library has it.

    The last part of a name is enough, unless it is a common word.
    """
    entry = _entry(name, known)
    if not entry:
        return ""
    library, theirs, ours = entry
    if not settings_in(ours):
        return f"nemorl has no {theirs}: {ours.removeprefix('none: ')}"
    who = theirs if library == "any" else f"{library}'s {theirs}"
    first = re.match(r"[\w.]+(?:, [\w.]+)*", ours)
    named = first[0].split(", ") if first else []
    keys = [key for key in named if key in known] or [_key(ours, known)]
    page = page_of(keys[0] or settings_in(ours)[0])
    if keys[0]:
        value = """ '{"gpu_memory_utilization": 0.5}'""" * theirs.endswith("gpu_memory_utilization")
        return f"{who} is {ours}; write {' and '.join(map(write, keys))}{value} (docs/{page})"
    return f"{command} has no {settings_in(ours)[0]}, as {who} is called here (docs/{page})"


def page_of(key: str) -> str:
    """Return the page that explains a setting."""
    section, dot, _ = key.partition(".")
    return table()["pages"].get(key, f"configuration.md#{section if dot else 'nemorl-grpo'}")


def _entry(name: str, known: Collection[str]) -> tuple[str, str, str] | None:
    """Return a library, its name and ours: the first with a key that can be written, if any."""
    every = [
        (lib, theirs, ours) for lib, names in libraries().items() for theirs, ours in names.items()
    ]
    last = "" if _last(name) in table()["common"] else _last(name)
    for found in (
        [each for each in every if each[1] == name],
        [each for each in every if each[1] == last],
        [each for each in every if _last(each[1]) == last],
    ):
        if found:
            return min(found, key=lambda each: not _key(each[2], known))
    return None


def _key(ours: str, known: Collection[str]) -> str:
    return next((key for key in settings_in(ours) if key in known), "")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
