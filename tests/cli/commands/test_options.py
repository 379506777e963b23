"""What the commands that talk to a cluster understand alike: durations, which job is meant, files
and folders of jobs.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kdist import backends
from kdist.commands import options, targets
from kdist.errors import Code, InvalidJobError, KdistError, NotFoundError, UsageError
from kdist.job import find


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("1.5m", 90),
    ],
)
def test_a_duration_is_read_as_kubectl_reads_it(text: str, seconds: float) -> None:
    assert options.seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "5x", "-1", "1.m", "five", "9" * 400, "9" * 400 + "d", "٣"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        options.seconds(text)


def test_a_job_is_meant_by_its_name_or_by_its_file(job_file: Path) -> None:
    assert find.refer("digits") == ("digits", None)
    assert find.refer("job/digits") == ("digits", None)
    assert find.refer("job/runs/digits") == ("job/runs/digits", None), "the path of a run folder"
    assert find.refer("job.yaml") == ("digits", None)
    job_file.write_text(
        job_file.read_text().replace("name: digits", "name: digits\n  namespace: ml")
    )
    assert find.refer(None, str(job_file)) == ("digits", "ml")
    for nothing in ((None, None), ("a", "job.yaml")):
        with pytest.raises(UsageError, match="name one job"):
            find.refer(*nothing)


def test_a_folder_stands_for_the_job_files_in_it(job_file: Path, job: str) -> None:
    folder = job_file.parent / "jobs"
    folder.mkdir()
    with pytest.raises(UsageError, match="no job file in the folder"):
        targets.read_jobs([str(folder)])
    (folder / "b.yaml").write_text(job.replace("digits", "b", 1))
    (folder / "a.yml").write_text(job.replace("digits", "a", 1))
    (folder / "README.md").write_text("not a job")
    found = targets.read_jobs([str(folder), "job.yaml"], ["spec.maxRestarts=3"])
    expected = [("a", 3), ("b", 3), ("digits", 3)]
    assert [(each.metadata.name, each.spec.max_restarts) for each, _ in found] == expected
    assert [base for _, base in found] == [folder, folder, job_file.parent]


def test_the_problems_of_all_files_come_at_once_and_a_job_comes_once(
    job_file: Path, job: str
) -> None:
    for name in ("one.yaml", "two.yaml"):
        Path(name).write_text(job.replace("epochs: 5", "epochs: many"))
    with pytest.raises(InvalidJobError) as raised:
        targets.read_jobs(["one.yaml", "two.yaml"])
    assert {problem.source for problem in raised.value.problems} == {"one.yaml", "two.yaml"}
    with pytest.raises(UsageError, match="digits: two of these files describe the same job"):
        targets.read_jobs(["job.yaml", "job.yaml"])
    with pytest.raises(UsageError, match="name a job file"):
        targets.read_jobs([])


@pytest.mark.parametrize("active", [True, False])
def test_a_run_that_is_nowhere_is_said_to_be_neither_here_nor_in_a_known_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: bool
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(
        NotFoundError, match=r"no (active )?run digits on this machine, and no kubeconfig"
    ) as raised:
        find.find(find.JobRef("digits"), active=active)
    assert str(tmp_path / "runs") in str(raised.value.hint)
    with pytest.raises(KdistError) as asked:
        find.find(find.JobRef("digits"), find.Place("ml"), active=active)
    assert asked.value.code is Code.UNREACHABLE, "whoever names a namespace means the cluster"
    (tmp_path / "none").write_text("kind: Config\n")
    with pytest.raises(KdistError) as asked:
        find.find(find.JobRef("digits"), active=active)
    assert asked.value.code is Code.UNREACHABLE, "the cluster is asked"


def test_the_help_of_backend_names_every_kind() -> None:
    assert tuple(backends.NAMES) == options.BACKENDS
