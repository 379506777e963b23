"""What pages call the default of a field, or of a value of the chart, is its default: a word
(`WORD`, the default) or a number in parentheses behind the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from kdist import backends
from kdist.manifest import CLAIM
from kdist.spec import TrainingJob
from tests.docs.blocks import DOCS, PAGES
from tests.house.tree import ROOT
from tests.manifests.jobs import IMAGE, load, place

WORD = re.compile(r"`([^`\n]+)`\*{0,2}(?:, the default\b| \([^()`]*\bthe default\b)")
"""A value that is called the default, or a field with it: `NAME: VALUE`, also in braces."""
PAIR = re.compile(r"(\w+): (\w+)\}*")
NAME = re.compile(r"`(?:[\w.]+\.)?(\w+)(?:`|: )")
BARE = {
    "apiVersion": "kdist.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "bare"},
    "spec": {
        "image": IMAGE,
        "checkpoints": {"size": "1Gi"},
        "train": {"workload": "digits", "epochs": 1},
    },
}


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of the job file, in its schema."""
    for form in TrainingJob.model_json_schema(by_alias=True)["$defs"].values():
        yield from form.get("properties", {}).items()


def decided() -> dict[str, str]:
    """What kdist decides for a job that says nothing, where the schema has no word of it."""
    job = load(BARE)
    (claim,) = [each for each in place(job) if each.kind == CLAIM]
    (mode,) = claim.document["spec"]["accessModes"]
    return {
        "accessMode": mode,
        "reclaimPolicy": "Retain" if claim.stays else "Delete",
        "rendezvous": backends.choose_rendezvous(job),
    }


def words() -> dict[str, tuple[set[str], set[str]]]:
    """By the name of a field, the words that it takes, and those that are its default."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    own = decided()
    for name, field in fields():
        taken, usual = found.setdefault(name, (set(), set()))
        for each in (field, *field.get("anyOf", ())):
            taken.update(map(str, each.get("enum", ())))
        default = own.get(name, field.get("default"))
        if isinstance(default, dict):  # `{auto: true}` is `auto` for short
            default = next((key for key, value in default.items() if value is True), None)
        if isinstance(default, str):
            taken.add(default)
            usual.add(default)
    return found


def called_default() -> Iterator[tuple[str, str, str]]:
    """The page, the field and the value of each word that is called a default; the field is the
    one behind it, or else the last one before it that takes the word.
    """
    known = words()
    for page in PAGES:
        text = page.read_text()
        for found in WORD.finditer(text):
            if found[1].startswith("--"):  # an option of a command
                continue
            if pair := PAIR.search(found[1]):
                yield page.name, pair[1], pair[2]
                continue
            before = text[: found.start()].rpartition("\n#")[2]
            named = [name for name in NAME.findall(before) if found[1] in known.get(name, [()])[0]]
            yield page.name, named[-1] if named else "", found[1]


def test_a_word_that_a_page_calls_the_default_is_that_of_its_field() -> None:
    known, said = words(), [*called_default()]
    assert [each for each in said if each[2] not in known.get(each[1], ((), ()))[1]] == []
    assert {(name, value) for _, name, value in said} >= {*decided().items()}
    assert {name for _, name, _ in said} >= {"onNonfinite", "every", "load", "backend"}


def test_a_number_in_parentheses_behind_a_field_is_its_default() -> None:
    known: dict[str, set[str]] = {}
    for name, field in fields():
        if "default" in field:
            known.setdefault(name, set()).add(str(field["default"]))
    found = [
        (page.name, name, number)
        for page in PAGES
        for name, number in re.findall(r"`([a-z]+[A-Z]\w+)`\*{0,2} \((\d+)\)", page.read_text())
    ]
    assert len(found) >= 5
    assert [each for each in found if each[2] not in known.get(each[1], ())] == []


def test_pages_name_the_alerts_that_the_chart_disables_by_default() -> None:
    values = yaml.safe_load((ROOT / "charts/kdist/values.yaml").read_text())
    disabled = set(values["monitoring"]["prometheusRule"]["disabled"])
    page = (DOCS / "how-to/monitoring.md").read_text()
    assert set(re.findall(r"`(\w+)` is off by default", page)) == disabled
    runbooks = re.split(r"^## ", (DOCS / "reference/runbooks.md").read_text(), flags=re.MULTILINE)
    said = {each.split()[0] for each in runbooks if "disables this alert by default" in each}
    assert said == disabled
