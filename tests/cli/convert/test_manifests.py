"""Manifests of the shapes that teams have become jobs that kdist takes, and whose pods have what
the original's had, unless it is named.

`KDIST_REGENERATE=1 pytest tests/cli/convert` writes the expected texts again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kdist import backends
from kdist.backends import Placement
from kdist.convert.manifests import Conversion, convert_files
from kdist.convert.values import NEEDLESS
from kdist.job_file import load_text
from kdist.manifest import QUEUE_LABEL, own_labels
from kdist.render import find_pods, render
from tests.cli.conftest import Kdist

FOLDER = Path(__file__).parent / "manifests"
NAMES = sorted(path.name for path in FOLDER.iterdir())
KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "tolerations": "key"}
# What a field of the job has in another form, or kdist itself.
ELSEWHERE = (
    "spec.script",
    "spec.data",
    "spec.checkpoints",
    "spec.nodes",
    "the same value",
    "the container",
    "kdist's own volume",
)
DIFFERENT = {
    "1073741824",
    "1.8Ti",
    "1.5Ti",
    "64G",
    "2500m",
}  # quantities that are written in another unit


@pytest.mark.parametrize("name", NAMES)
def test_the_job_and_what_is_named_are_as_expected(
    name: str, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    result = kdist("convert", name)
    shown = f"{result.stdout}\n--- exit code {result.exit_code}\n{result.stderr}"
    file = FOLDER.parent / "expected" / f"{name}.txt"
    if os.environ.get("KDIST_REGENERATE"):
        file.write_text(shown)
    assert shown == file.read_text()
    assert kdist("validate", "-", stdin=result.stdout).exit_code == 0


@pytest.mark.parametrize("key", own_labels(""))
def test_a_label_that_kdist_writes_itself_is_not_taken_over(key: str, tmp_path: Path) -> None:
    text = (FOLDER / "pytorchjob-gpu.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("app.kubernetes.io/name:", f"{key}:"))
    (found,), _ = convert_files(str(tmp_path / "job.yaml"))
    assert key not in load_text(found.write(), source="converted").metadata.labels
    assert [outcome.kind for value, outcome in found.values if value.key == key] == [NEEDLESS]


def keyed(value: Any, part: str = "") -> Any:
    """The same values, with the items of a list under what names them."""
    if isinstance(value, dict):
        return {key: keyed(each, key) for key, each in value.items()}
    if isinstance(value, list):
        name = KEYS.get(part, "name")
        return {
            str(each.get(name, index) if isinstance(each, dict) else index): keyed(each)
            for index, each in enumerate(value)
        }
    return value


def flat(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Each leaf by its path."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf for name, each in value.items() for key, leaf in flat(each, (*path, name)).items()
    }


def missing(conversion: Conversion) -> list[str]:
    """Values of the original's pod that the rendered pod does not have, and that nothing names."""
    job = load_text(conversion.write(), source="converted")
    image = job.spec.image or "registry.example.com/none:1"
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"image": image})})
    backend = backends.get("job" if job.spec.backend == "auto" else job.spec.backend)
    objects = render(job, Placement(backend.name, "kubernetes", "run"))
    rendered = flat(keyed(next(pod for each in objects for pod in find_pods(each.document))))
    texts = {str(value) for value in rendered.values()} | {str(job.spec.resources.gpu)}
    found = []
    for value, outcome in conversion.values:
        in_pod = "containers" in value.path or "template" in value.path
        if not in_pod or outcome.kind in ("leftOut", "needless"):
            continue
        if outcome.text.startswith(ELSEWHERE) or value.value() in ({}, []):
            continue
        if {"command", "args"} & {*value.path} and outcome.kind == "kept":
            continue  # of the launcher
        same = str(value.value()) in texts or value.text in texts or value.text in DIFFERENT
        renamed = value.key == "name" and any(each.startswith(f"{value.text}-") for each in texts)
        if not same and not renamed and QUEUE_LABEL not in value.path:
            found.append(str(value.problem(f"{value.value()} is missing ({outcome})")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_pod_has_what_the_original_had_unless_it_is_named(name: str) -> None:
    conversions, _ = convert_files(str(FOLDER / name))
    assert conversions
    for each in conversions:
        assert missing(each) == []
