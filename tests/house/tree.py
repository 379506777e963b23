"""The files that these tests look at, and the shape of a finding."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A rule reads a file's text and says what is wrong, each finding as "LINE: what".
Rule = Callable[[str], Iterable[str]]


@cache
def files() -> tuple[Path, ...]:
    """Every file that is in the repository or about to be: tracked, or new and not ignored; without
    links.
    """
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        listing, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    paths = (ROOT / name for name in sorted(names) if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def python_files(*rooms: str) -> tuple[Path, ...]:
    """Python sources below the given folders, or all of them."""
    return tuple(
        path
        for path in files()
        if path.suffix == ".py" and (not rooms or path.relative_to(ROOT).parts[0] in rooms)
    )


def broken(rule: Rule, paths: Iterable[Path]) -> list[str]:
    """What a rule finds in these files, as `path:line: what`."""
    return [
        f"{path.relative_to(ROOT)}:{found}"
        for path in paths
        for found in rule(path.read_text(encoding="utf-8"))
    ]
