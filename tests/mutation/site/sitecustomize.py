"""A source file that is imported with other contents.

Processes that a test starts get it, too: they have this folder on their PYTHONPATH.
"""

import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

MUTANT = "NEMORL_MUTANT"
"""The environment variable: the file's path, and after the separator the path of what to read
instead.
"""


def override(path: str, contents: bytes) -> None:
    """From now on the import system reads `contents` where it would read the file `path`, and no
    compiled copy of it.
    """
    get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def mutated_data(self: SourceFileLoader, asked: str) -> bytes:
        return contents if asked == path else get_data(self, asked)

    def mutated_stats(self: SourceFileLoader, asked: str):
        if asked == path:
            raise OSError("a mutant is not cached")
        return path_stats(self, asked)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = mutated_data, mutated_stats  # type: ignore[method-assign, assignment]


if MUTANT in os.environ:
    _path, _contents = os.environ[MUTANT].split(os.pathsep)
    override(_path, Path(_contents).read_bytes())
