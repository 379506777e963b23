"""Every job file in examples/ trains, with less to do than it says.

Two are run elsewhere: digits.yaml by `make demo`, script/job.yaml by `test_scripts`, each with a
rank killed on the way. Those in gpu/ ask for devices of a cluster and are only rendered, by
tests/manifests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.tree import ROOT
from tests.trainer.checkpoint.exported import assert_each_done_tells_what_is_kept

ELSEWHERE = {
    "digits.yaml",
    "gpu/dra.yaml",
    "gpu/h100-infiniband.yaml",
    "gpu/mig.yaml",
    "script/job.yaml",
}
FOLDER = ROOT / "examples"
FILES = [
    path
    for path in sorted(FOLDER.rglob("*.yaml"))
    if str(path.relative_to(FOLDER)) not in ELSEWHERE
]


def shorten(job: dict[str, Any]) -> list[str]:
    """What `--set` makes of the job, so that it ends soon."""
    train = job["spec"]["train"]
    settings = ["spec.train.steps=4" if "steps" in train else "spec.train.epochs=1"]
    if train["workload"] == "gpt":
        # all that is held out is measured at the end
        settings.append("spec.train.options.corpusBytes=65536")
    return [word for setting in settings for word in ("--set", setting)]


def test_every_file_is_run_by_a_test() -> None:
    jobs = {path: yaml.safe_load(path.read_text())["spec"] for path in FOLDER.rglob("*.yaml")}
    code = {
        path.parent / spec["code"] / f"{spec['train']['workload'].partition(':')[0]}.py"
        for path, spec in jobs.items()
        if "train" in spec and "code" in spec
    }
    tests = (
        Path(__file__).with_name("test_scripts.py").read_text(),
        Path(__file__).with_name("test_frameworks.py").read_text(),
        (ROOT / "Makefile").read_text(),
    )
    left = [
        path
        for path in FOLDER.rglob("*.py")
        if path.parent.parent.name != "init"  # which test_init runs, each in a folder of its own
        and path not in code
        and not any(path.name in text for text in tests)
    ]
    assert [
        path for path in left if path.name not in "".join(str(spec) for spec in jobs.values())
    ] == []
    assert all((FOLDER / name).is_file() for name in ELSEWHERE)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_an_example_job_trains(file: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kdist",
        "run",
        str(file),
        *shorten(yaml.safe_load(file.read_text())),
        "-o",
        "json",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["outcome"] == "done"
    assert_each_done_tells_what_is_kept(tmp_path)
