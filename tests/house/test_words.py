"""No tracked file names a machine, a registry's host or the workplace it was written at, and words
for which the field has another name do not come back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

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


# Words that stood for something for which the field has a name: the name is what to write.
ODD = {
    "anatomy": "breakdown",
    "anew": "again, or re-create",
    "attendance": "worker monitor",
    "autopsy": "exit analysis",
    "beside": "next to, or in addition to",
    "conference": "sync point",
    "convict": "mismatch failure",
    "culprit": "hung rank",
    "diary": "step log",
    "farewell": "exit records",
    "hasty": "fail-fast",
    "laps": "step timer",
    "lifeline": "parent-death pipe",
    "litter": "stale files",
    "misfits": "strict",
    "narrate": "format an event",
    "receipt": "report",
    "rehearsed": "tried by a server-side dry run",
    "standstill": "stall, or hang",
    "steer": "manage, or the verb itself",
    "undisturbed": "uninterrupted",
    "verdict": "result, or decision",
    "witness": "local rank 0",
}

HERE = Path(__file__).resolve()
PRODUCT = (
    "cli",
    "controller",
    "trainer",
    "tools",
    "docs",
    "charts",
    "manifests",
    "tests",
    "bench",
    "examples",
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


def test_code_and_documentation_use_the_words_of_the_field() -> None:
    odd = re.compile(rf"\b({'|'.join(ODD)})\b", re.IGNORECASE)
    product = [ROOT / name for name in PRODUCT]
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts += [path for path in files() if any(path.is_relative_to(root) for root in product)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}: write {ODD[match[0].lower()]}"
        for path in texts
        if path != HERE and path.suffix in {".py", ".md", ".yaml", ".j2", ".json"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in odd.finditer(line)
    ]
    assert found == []


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
