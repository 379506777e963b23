"""Names: a public class name stands once per distribution, and odd words do not come back."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.house.tree import ROOT, files, python_files

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


@pytest.mark.parametrize(
    "root", ["cli/kdist", "controller/kdist_controller", "trainer/kdist_trainer", "tools"]
)
def test_a_public_class_name_stands_once_per_distribution(root: str) -> None:
    names = Counter(
        node.name
        for path in python_files()
        if path.is_relative_to(ROOT / root)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


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


def test_what_two_sides_must_spell_alike_stands_in_one_module() -> None:
    """A label or annotation of kdist's in the whole product; a variable in each distribution, which
    may have it from `kdist_trainer.formats`.
    """
    where: defaultdict[str, set[Path]] = defaultdict(set)
    for path in python_files("cli", "controller", "trainer"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(name, str) and re.fullmatch(r"kdist\.dev/[-a-z]+|KDIST_[A-Z_]+", name):
                where[name].add(path if "/" in name else path.relative_to(ROOT).parents[-2])
    assert {name: found for name, found in where.items() if len(found) > 1} == {}
