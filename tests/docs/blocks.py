"""The fenced blocks of the documentation's pages, and what the line before each says of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests.house.tree import ROOT, files

DOCS = ROOT / "docs"
PAGES = [path for path in files() if path.suffix == ".md" and path.is_relative_to(DOCS)]

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>[^\n]*?) -->\n\n?)?"
    r"^(?P<indent>[ ]*)```(?P<language>[\w-]+)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block: its language, its text, its mark and the line where it begins."""

    language: str
    text: str
    mark: str
    line: int

    @property
    def is_run(self) -> bool:
        """Whether it is typed or parsed like the others of its page."""
        return not self.mark.startswith(("not run:", "run by:"))

    @property
    def on_a_cluster(self) -> bool:
        """Whether it needs a cluster."""
        return self.mark == "on a cluster"

    @property
    def commands(self) -> list[str]:
        """What is typed: lines after `$ ` of a session, with their continuations; all lines of a
        script; what writes a file.
        """
        if self.mark.startswith("file: "):
            return [f"cat > {shlex.quote(self.mark[6:])} <<'END'\n{self.text}END"]
        if self.language == "bash":
            return [self.text]
        if self.language != "console":
            return []
        return [
            found[1].rstrip()
            for found in re.finditer(r"^\$ ((?:.*\\\n)*.*)$", self.text, re.MULTILINE)
        ]

    @property
    def shown(self) -> list[tuple[str, list[str]]]:
        """Each command of a session, and the first words of the lines that follow it."""
        if self.language != "console" or self.mark.startswith("file: "):
            return [(command, []) for command in self.commands]
        outputs = re.split(r"^\$ (?:.*\\\n)*.*\n?", self.text, flags=re.MULTILINE)[1:]
        words = [
            [line.split()[0] for line in each.splitlines() if line.strip()] for each in outputs
        ]
        return list(zip(self.commands, words, strict=True))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page that name a language."""
    return [
        Block(
            found["language"],
            re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            found["mark"] or "",
            text.count("\n", 0, found.start("indent")) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def typed(page: Path, *, on_a_cluster: bool) -> list[str]:
    """What a page has one type, in its order: either what needs a cluster or the rest."""
    return [command for command, _ in shown(page, on_a_cluster=on_a_cluster)]


def shown(page: Path, *, on_a_cluster: bool) -> list[tuple[str, list[str]]]:
    """The same, each with the first words of the lines that it is said to print."""
    return [
        each
        for block in blocks(page.read_text())
        if block.is_run and block.on_a_cluster == on_a_cluster
        for each in block.shown
    ]


def where(page: Path, block: Block) -> str:
    """Page and line of a block."""
    return f"{page.relative_to(ROOT)}:{block.line}"
