"""No tracked file names a machine, a registry's host or the workplace it was written at."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.house.tree import ROOT, broken, files

# Written in pieces, so that this file passes its own test.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.}~-])/(?:wo"
    + r"rk|home/(?!me\b)[a-z]\w*|Users/\w+)/|/ro"
    + r"ot/[.\w]|/tmp/kd"
    + "ist",
    "a registry's host": r"\b(?:pypi\.o"
    + r"rg|pythonhos"
    + r"ted\.org|deb\.deb"
    + r"ian\.org|registry\.npm"
    + "js|index\\.cra"
    + "tes)",
    "a paper that is not in the tree": r"\b(?:DES"
    + r"IGN|CONTR"
    + r"ACT)\.md\b|\bfa"
    + r"cts/[A-Z]",
    "the number of an issue": r"(?i)\b(?:iss"
    + r"ues? #?|fix(?:es)? #|close[sd]? #|see #|PR #?)\d|\(#\d+\)",
    "the workplace": r"(?i)\banthro" + r"pic\b|\bcla" + r"ude\b|\bC" + r"EO\b|this workp" + "lace",
}
TEXT = tuple(
    path
    for path in files()
    if path.suffix not in {".png", ".svg", ".gz"}
    and path.name not in {"requirements.txt", "LICENSE"}
)


def unfit_words(text: str) -> Iterator[str]:
    """Words that have no business in the tree, with their line."""
    for number, line in enumerate(text.splitlines(), start=1):
        for what, pattern in FORBIDDEN.items():
            if match := re.search(pattern, line):
                yield f"{number}: {match[0]} is {what}"


def test_no_file_holds_an_unfit_word() -> None:
    assert broken(unfit_words, TEXT) == []


@pytest.mark.parametrize(
    "line",
    [
        "cd /wo" + "rk/main",
        "cache: /ro" + "ot/.cache",
        "open('/home/" + "jo/x')",
        "--index-url https://pypi.o" + "rg/simple",
        "see DES" + "IGN.md",
        "measured in fa" + "cts/TRAINING",
        "fixes iss" + "ue 12",
        "fixes #" + "12",
        "written with Cla" + "ude",
    ],
)
def test_an_unfit_word_is_noticed(line: str) -> None:
    assert list(unfit_words(f"fine\n{line}\n")) != []


@pytest.mark.parametrize(
    "line",
    [
        "a workflow/stage",
        "see $HOME/x",
        "all_reduce #17",
        "color #12ab34",
        "mountPath: /workspace/src",
        "the root/leaf",
    ],
)
def test_an_innocent_line_is_left_alone(line: str) -> None:
    assert list(unfit_words(line)) == []


def test_the_licence_is_the_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) == 202


def test_the_changelog_opens_with_what_is_not_released() -> None:
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("#")
    ]
    assert headings[:2] == ["# Changelog", "## Unreleased"]
    assert all(
        re.fullmatch(r"## (\d+\.\d+\.\d+ — \d{4}-\d{2}-\d{2}|Unreleased)|### \w[\w ]+", heading)
        for heading in headings[1:]
    )
