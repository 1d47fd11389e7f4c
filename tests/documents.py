"""Runs the code blocks of a Markdown document in the present folder: `python -m tests.documents
FILE.md`.

Blocks of python share one namespace; blocks of bash must succeed; one with a file name behind its
language is written to that file; `text` is output. Any other language is an error.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SETUP = re.compile(r"^(make|pip|uv|source|git clone|cd) .*$", re.MULTILINE)
"""What sets the project up, as whoever runs the tests has done already."""


class Block(NamedTuple):
    language: str
    file: str
    code: str
    line: int


def blocks(document: Path) -> Iterator[Block]:
    """Every fenced block of a document."""
    text = document.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), (
        f"{document.name}: a block has no language or no end"
    )
    for match in BLOCK.finditer(text):
        yield Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start()) + 2)


def run(document: Path) -> int:
    """Run all blocks; returns how many there were."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = list(blocks(document))
    for block in found:
        where = f"{document.name}:{block.line}"
        print(f"== {where} {block.language} {block.file}", flush=True)
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.code, str(document), "exec"), namespace)
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", SETUP.sub("", block.code)], check=False
            )
            assert done.returncode == 0, f"{where}: exit code {done.returncode}"
        else:
            assert block.language == "text", f"{where}: {block.language} blocks need a file name"
    return len(found)


if __name__ == "__main__":
    sys.path.insert(0, "")
    run(Path(sys.argv[1]).resolve())
