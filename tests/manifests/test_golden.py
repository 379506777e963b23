"""What the examples become, kept as files: a change of a template shows in the diff of a review.

`make generate` writes them again. A file next to the Indexed Job's holds only the objects that an
Indexed Job does not have; the two documents within the ConfigMap, whose fields are the trainer's,
are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kdist import backends
from kdist.render import text
from kdist.spec import TrainingJob
from tests.manifests.jobs import EXAMPLES, FULL, example, load, place

FOLDER = Path(__file__).parent / "golden"
JOBS = (*EXAMPLES, "full")
CASES = [(job, backend) for job in JOBS for backend in backends.NAMES]


def find_job(name: str) -> TrainingJob:
    return load(FULL) if name == "full" else example(EXAMPLES[name])


def shorten(document: dict[str, Any]) -> None:
    for key in ("train.json", "job.json"):
        if key in document.get("data", {}):
            document["data"][key] = "…"


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_an_example_renders_to_its_golden_file(name: str, backend: str) -> None:
    job = find_job(name)
    found = place(job, backend)
    if backend != "job":
        shared = {(each.api_version, each.kind) for each in place(job, "job")}
        found = [each for each in found if (each.api_version, each.kind) not in shared]
    assert found, f"a {backend} has no object that an Indexed Job does not have"
    for each in found:
        shorten(each.document)
    path = FOLDER / name / f"{backend}.yaml"
    rendered = text.to_yaml(found, annotate=name == "full") + "\n"
    rendered = re.sub(r"(-train-|--rendezvous-id=)[0-9a-f]{10}", r"\1DIGEST", rendered)
    if os.environ.get("KDIST_REGENERATE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rendered)
    assert path.is_file(), "run: make generate"
    assert path.read_text() == rendered, "if that is meant, run: make generate"


def test_no_golden_file_is_left_over() -> None:
    assert {(path.parent.name, path.stem) for path in FOLDER.rglob("*.yaml")} == set(CASES)
