"""A run on this machine as the commands about jobs see it: really trained, suspended and looked at
again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kdist.job.local.job import LocalJob
from tests.cli.conftest import Kdist
from tests.cli.running import Start, commits, write_job


@pytest.mark.sampled
@pytest.mark.processes
def test_a_run_is_shown_while_it_trains_and_after_it_was_suspended(
    tmp_path: Path, start: Start, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run = start(write_job(tmp_path, nodes=1, steps=1_000_000))
    run.wait_until(lambda: commits(run.folder("digits")), "a checkpoint")
    shown = json.loads(kdist("status", "digits", "-o", "json").stdout)
    assert (shown["phase"], shown["location"]) == ("Running", "local")
    assert shown["step"] >= 10
    assert kdist("wait", "digits", "--for=first-step").exit_code == 0
    assert "nothing is wrong: digits trains" in kdist("why", "digits").stdout
    assert "first-step" in kdist("logs", "digits", "--rank", "0").stdout
    _check_events(kdist)
    refused = kdist("delete", "digits", "--no-wait")
    assert (refused.exit_code, "Next: kdist suspend digits" in refused.stderr) == (2, True)
    _check_refusals(kdist, "kdist suspend digits")
    stopped = kdist("suspend", "digits")
    assert stopped.exit_code == 0, stopped.stderr
    run.wait(11)
    saved = max(commits(run.folder("digits")))
    suspended = f"digits is suspended: step {saved:,} is saved"
    following = "Next: kdist resume digits   continues from there"
    assert stopped.stdout == f"{suspended}. {following}\n"
    after = json.loads(kdist("status", "digits", "-o", "json").stdout)
    assert (after["phase"], after["lastCheckpointStep"]) == ("Suspended", saved)
    assert kdist("wait", "digits").exit_code == 11
    assert f"step {saved:,} is saved" in kdist("why", "digits").stdout
    assert kdist("suspend", "digits").stdout.startswith("digits is already suspended")
    planned = kdist("delete", "digits", "--dry-run=client")
    assert "deleted (client dry run)" in planned.stdout
    assert (run.folder("digits") / "run.json").exists()
    deleted = kdist("delete", "digits")
    assert deleted.stdout == f"run {run.folder('digits')} deleted\n"
    assert [path.name for path in run.folder("digits").iterdir()] == ["checkpoints"]
    assert "`kdist delete digits --purge --local` deletes it" in deleted.stderr
    again = start(write_job(tmp_path, nodes=1, steps=saved + 2))
    again.wait(0)
    assert "resumed" in kdist("events", "digits").stdout, "the checkpoints were those of the job"
    assert kdist("delete", "digits").exit_code == 0
    assert kdist("delete", "digits", "--purge", "--local").exit_code == 0
    assert not run.folder("digits").exists()
    assert kdist("delete", "digits", "--purge", "--local").exit_code == 4


def _check_events(kdist: Kdist) -> None:
    shown = kdist("events", "digits").stdout.splitlines()
    assert shown[0].split() == ["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert all(
        re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ +(Normal|Warning) ", each) for each in shown[1:]
    )
    found = json.loads(kdist("events", "digits", "-o", "json").stdout)
    assert found["kind"] == "List"
    first = next(each for each in found["items"] if each["reason"] == "first-step")
    assert (first["type"], first["involvedObject"]["name"]) == ("Normal", "node-0")
    assert kdist("events", "digits", "--types=Warning").stdout.count("Normal") == 0


def _check_refusals(kdist: Kdist, restart: str) -> None:
    """What only a job on a cluster knows is refused with what to type instead."""
    expected = {
        ("restart", "digits"): restart,
        ("scale", "digits", "--nodes", "2"): restart,
        ("exec", "digits", "--", "nproc"): "nproc",
        ("port-forward", "digits"): "curl http://127.0.0.1:",
    }
    for typed, command in expected.items():
        refused = kdist(*typed)
        assert refused.exit_code == 2, typed
        assert "digits is a run on this machine" in refused.stderr, typed
        assert f"Next: {command}" in refused.stderr, typed


@pytest.mark.parametrize("outcome", ["done", "killed", None])
def test_a_run_that_has_ended_says_how(
    tmp_path: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch, outcome: str | None
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "digits").mkdir()
    begun = {"started": 1.0, "ended": None, "outcome": outcome}
    (tmp_path / "digits" / "run.json").write_text(
        json.dumps({"run_id": "a", "created": 1.0, "invocations": [begun]})
    )
    phase = {"done": "Succeeded", "killed": "Stopped", None: "Unknown"}[outcome]
    assert kdist("status", "digits").stdout.splitlines()[1].split()[1] == phase
    assert kdist("suspend", "digits").exit_code == 1
    assert kdist("why", "digits").exit_code == 0


@pytest.mark.parametrize(
    ("recorded", "option", "expected"),
    [
        (["run", "t.py", "--resume"], (), "kdist run t.py --resume"),
        (["run", "t.py", "--nodes", "4"], ("--nodes", "2"), "kdist run --nodes 2 t.py --nodes 4"),
        (
            ["run", "--nodes", "4", "--set", "a=1", "-o", "json", "j.yaml"],
            ("--nodes", "2"),
            "kdist run --nodes 2 --set a=1 -o json j.yaml",
        ),
        (["run", "j.yaml", "-d"], ("--fresh", ""), "kdist run --fresh j.yaml -d"),
        ([], ("--fresh", ""), "kdist run --fresh JOB.yaml"),
    ],
)
def test_a_changed_option_leaves_the_arguments_of_the_script_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[str],
    option: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = {"started": 1.0, "command": recorded, "cwd": str(tmp_path)}
    (tmp_path / "run.json").write_text(json.dumps({"invocations": [begun]}))
    assert LocalJob(tmp_path).next_run_with(*option) == expected


def test_a_resume_that_ends_at_once_shows_what_the_run_printed(
    tmp_path: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "digits").mkdir()
    gone = ["run", "gone.yaml"]
    begun = {"started": 1.0, "ended": 2.0, "outcome": "stopped", "command": gone}
    (tmp_path / "digits" / "run.json").write_text(
        json.dumps({"run_id": "a", "created": 1.0, "invocations": [begun]})
    )
    refused = kdist("resume", "digits")
    assert refused.exit_code == 1
    assert "Error: there is no file `gone.yaml`\n" in refused.stderr
    assert "Error: digits was not resumed: `kdist run gone.yaml` ended at once" in refused.stderr


def test_a_run_that_was_stopped_before_it_could_save_is_not_called_saved(
    tmp_path: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    folder = tmp_path / "digits"
    folder.mkdir()
    begun = {"started": 1.0, "ended": 2.0, "outcome": "stopped", "command": ["run", "job.yaml"]}
    (folder / "run.json").write_text(
        json.dumps({"run_id": "a", "created": 1.0, "invocations": [begun]})
    )
    steps = {"committed": 0, "reached": 75, "lost": 0}
    report = {"runId": "a", "invocation": 1, "trainerExitCode": 200, "steps": steps, "notSaved": 75}
    (folder / "report.json").write_text(json.dumps(report))
    answer = json.loads(kdist("why", "digits", "-o", "json").stdout)
    assert answer["cause"] == "not-saved"
    assert "stopped, without saving; nothing was saved, of 75 steps" in answer["sentence"]
