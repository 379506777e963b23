"""A user's own file, next to the built wheels: mypy knows the types of what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

PROGRAM = """\
from collections.abc import Iterator

import kdist


def train(steps: int) -> None:
    print(steps)


def read(rank: int) -> Iterator[str]:
    job: kdist.JobDefinition = kdist.load("job.yaml", "spec.procsPerNode=2")
    try:
        run: kdist.JobHandle = job.set("spec.nodes=2").run(fresh=True)
    except kdist.InvalidJobError as error:
        raise SystemExit(str(error.problems)) from error
    except (kdist.UsageError, kdist.NotFoundError) as error:
        raise SystemExit(error.hint) from error
    except kdist.KdistError as error:
        raise SystemExit(1 if error.code is kdist.Code.TIMEOUT else 2) from error
    status = run.wait("first-step", timeout=60.0)
    step: int | None = status.step
    ended: kdist.Phase = run.wait(timeout="5m").phase
    losses: list[float] = [row["loss"] for row in run.metrics()]
    last: kdist.Checkpoint = run.checkpoints()[-1]
    cause: kdist.Diagnosis = run.why()
    every: list[kdist.JobStatus] = kdist.list_jobs()
    print(step, ended, cause.fix, kdist.get(every[0]), losses, last.state_dict(), run.report())
    names: list[str] = [each.name for each in kdist.list_jobs(namespace="ml")]
    print(names, kdist.get("typed", context="c").status().phase)
    kdist.from_code(train, nodes=2, args={"steps": 1}).apply(namespace="ml", timeout=5)
    kdist.train(train, nodes=2)
    yield from run.logs(rank, follow=True)
"""
FIELDS = """\
import kdist

spec = kdist.Spec(
    nodes=kdist.Nodes(min=1, max=2),
    train=kdist.Training(workload="digits", steps=10),
    resources=kdist.Resources(gpu=1),
)
job = kdist.TrainingJob(
    api_version="kdist.dev/v1alpha1",
    kind="TrainingJob",
    metadata=kdist.Metadata(name="typed"),
    spec=spec,
)
kdist.load(job).run()
"""
WRONG = """\
import kdist

kdist.get("x").wait("finished")
kdist.load("job.yaml").apply(namespaces="ml")
step: str = kdist.get("x").status().step
kdist.trian(print, nodes=2)
kdist.get("x", contxt="a")
kdist.get("x").wait("deleted").phase
kdist.load("job.yaml").apply(fresh="yes")
"""


def mypy(
    program: str, installed: Path, home: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    (home / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(home / "cache")]
    command += ["--python-executable", str(installed / "python"), *options, "program.py"]
    return subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)


def test_mypy_accepts_a_program_and_finds_its_mistakes(installed: Path, tmp_path: Path) -> None:
    good = mypy(PROGRAM, installed, tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = mypy(WRONG, installed, tmp_path)
    found = {line.split(":")[1] for line in bad.stdout.splitlines() if ": error:" in line}
    assert found == {str(line) for line in range(3, 10)}, bad.stdout


def test_mypy_checks_the_fields_of_a_job_with_pydantics_plugin(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mypy.ini").write_text("[mypy]\nplugins = pydantic.mypy\n")
    good = mypy(FIELDS, installed, tmp_path, "--config-file", "mypy.ini")
    assert good.returncode == 0, good.stdout + good.stderr
    bad = mypy(FIELDS.replace("steps", "step"), installed, tmp_path, "--config-file", "mypy.ini")
    assert '"step" for "Training"' in bad.stdout
