"""Names that pages and messages repeat are those of the code: causes, fields, commands, options."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Final, get_args

from kdist.diagnose import rule
from kdist.events import SENTENCES
from kdist.spec import reference
from kdist_trainer.agent.logs import NAMES
from kdist_trainer.config.exit_codes import Cause
from kdist_trainer.config.sources import OF_URL
from tests.docs.blocks import DOCS
from tests.house.tree import ROOT
from tools.reference.events import find_events

_NAME: Final = re.compile(r"`([a-z*-]+)`")


def list_causes() -> list[str]:
    """The first column of the table of causes."""
    page = (DOCS / "how-to/running-jobs.md").read_text()
    rows = page.partition("| causes | evidence |\n|---|---|\n")[2].partition("\n\n")[0]
    return [name for row in rows.splitlines() for name in _NAME.findall(row.split("|")[1])]


def test_the_page_lists_every_cause_that_why_names() -> None:
    listed, known = list_causes(), set(get_args(rule.Cause))
    assert len(listed) == len(set(listed))
    alone = {name for name in known if not any(fnmatch(name, each) for each in listed)}
    assert alone == set()
    assert [each for each in listed if not any(fnmatch(name, each) for name in known)] == []


def test_every_cause_of_the_trainer_has_a_name_for_why() -> None:
    unnamed = [cause for cause in Cause if rule.name_cause(cause) == "unknown"]
    assert unnamed == [Cause.UNKNOWN]
    assert rule.name_cause("cosmic_rays") == "unknown"
    assert rule.name_cause("NotSaved") == "not-saved"


def say(names: list[str]) -> str:
    *first, last = [f"`{name}`" for name in names]
    return f"{', '.join(first)} and {last}"


def test_the_rules_across_fields_are_on_the_page() -> None:
    text = (DOCS / "reference/job-yaml.md").read_text()
    folders = (ROOT / "cli/kdist/spec", ROOT / "trainer/kdist_trainer/config")
    sources = [path.read_text() for folder in folders for path in folder.glob("*.py")]
    forms = {
        tuple(re.split(", | and ", found))
        for source in sources
        for found in re.findall(r'"needs exactly one of ([\w, ]+? and \w+)', source)
    }
    assert len(forms) >= 9
    page = text.partition("## Rules that tie fields together\n")[2].partition("\n## ")[0]
    page = re.sub(r" \([^)]*\)", "", page)
    assert {each for each in forms if f" of {say(list(each))}" not in page} == set()
    fields = [field.path.removeprefix("spec.") for field in reference.root().walk()]
    sections = sorted(
        path.removesuffix(f".{OF_URL[-1]}").removesuffix("[]")
        for path in fields
        if path.endswith(f".{OF_URL[-1]}")
    )
    assert f"{say([*OF_URL])} of {say(sections)} go with `url`" in page


def test_the_page_of_events_has_each_that_is_logged() -> None:
    listed = re.findall(r"(?m)^\| `(.+?)` \|", (DOCS / "reference/events.md").read_text())
    assert listed == [*sorted(SENTENCES), *sorted(find_events().keys() - SENTENCES.keys())]
    # those that were found otherwise
    assert set(SENTENCES) <= find_events().keys()
    assert find_events().keys() >= NAMES
    for path in (ROOT / "trainer/kdist_trainer").rglob("*.py"):
        for name in re.findall(r'\blog\.\w+\(\s*"([a-z-]+)"', path.read_text()):
            assert name in listed or name in ("info", "warning", "error"), path
