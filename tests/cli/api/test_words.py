"""Errors, time-outs and displays of what programs import are in the words of Python."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import kdist
from kdist.api.words import in_python
from kdist.errors import Code, KdistError, UsageError
from kdist.job.local import run_dir
from kdist.job.local.job import LocalJob
from tests.cli.api.conftest import Cells
from tests.cli.deploy.conftest import api, serve, store

__all__ = ["api", "serve", "store"]


def make_run(home: Path, name: str = "digits", **more: object) -> kdist.JobHandle:
    """A run that has no process."""
    root = home / ".kdist" / name
    (root / "checkpoints" / "ledger").mkdir(parents=True)
    (root / "run.json").write_text(json.dumps({"run_id": "1", "invocations": [], **more}))
    return kdist.JobHandle(LocalJob(root))


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("--fresh archives that run", "fresh=True archives that run"),
        ("stop it: `kdist suspend a-b`, or Ctrl-C there", 'stop it: kdist.get("a-b").suspend()'),
        ("`kdist restart a -n ml`", 'kdist.get("a", namespace="ml").restart()'),
        ("`--set spec.nodes=2` does", '.set("spec.nodes=2") does'),
        ("--local chooses the run, -n NAMESPACE", 'local=True chooses the run, namespace="…"'),
        ("`kdist apply --direct` does", "`kdist apply --direct` does"),
        ("`kdist delete --orphans`, --direct", "`kdist delete --orphans`, direct=True"),
        ("KUBECONFIG or --kubeconfig to a", 'KUBECONFIG or kubeconfig="…" to a'),
        ("`kdist run` needs none", "run() needs none"),
        ("fix /none/run_fit.py:3", "fix /none/run_fit.py:3"),
    ],
)
def test_options_and_commands_are_keywords_and_methods_in_errors(command: str, python: str) -> None:
    @in_python
    def fail() -> None:
        raise KdistError(command, hint=command)

    with pytest.raises(KdistError) as caught:
        fail()
    assert (str(caught.value), caught.value.message, caught.value.hint) == (python,) * 3


def test_a_line_of_a_file_that_kdist_has_made_is_told_as_the_notebook_has_it(home: Path) -> None:
    made = home / "run_fit.py"
    made.write_text('"""Written."""\n\ndef fit():\n    return 1 / 0\n')
    for line, fix in ((4, f"fix `return 1 / 0` in `fit` ({made}:4)"), (1, f"fix {made}:1")):

        @in_python
        def fail(line: int) -> None:
            raise KdistError("failed", hint=f"fix {made}:{line}; then run it again")

        with pytest.raises(KdistError) as caught:
            fail(line)
        assert caught.value.hint == f"{fix}; then run it again"


def test_a_missing_image_is_a_keyword(api: object, cell: Cells) -> None:
    job = kdist.from_code(cell("def train():\n    pass\n")["train"], backend="job")
    with pytest.raises(KdistError, match=r"spec\.image is missing") as caught:
        job.apply()
    assert caught.value.hint == 'image="REGISTRY/NAME:TAG" sets it'


def test_a_run_that_is_active_says_how_python_stops_it(home: Path) -> None:
    folder = run_dir.RunFolder.open("slow")
    opened = in_python(run_dir.RunFolder.open)
    with pytest.raises(KdistError, match="another kdist run") as caught:
        opened("slow")
    folder.close()
    assert 'stop it first: kdist.get("slow").suspend(); or give' in caught.value.hint
    assert 'name="…"' in caught.value.hint


def test_a_time_out_is_a_number_or_what_the_option_takes(home: Path) -> None:
    run = make_run(home)
    for good in (0, 0.5, "1s", "1m"):
        with pytest.raises(KdistError) as ended:
            run.wait(timeout=good)
        assert not isinstance(ended.value, UsageError)
    for bad in ("5 minutes", -1, float("nan"), [5]):
        with pytest.raises(UsageError, match="timeout: ") as caught:
            run.wait(timeout=bad)  # type: ignore[arg-type]
        assert "5m" in str(caught.value) + caught.value.hint


def test_what_python_does_not_take_is_refused_by_name(home: Path) -> None:
    run = make_run(home)
    (status,) = kdist.list_jobs()
    assert kdist.get(status).name == run.name
    with pytest.raises(UsageError, match="5 is no job"):
        kdist.get(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"get\(\) got an unexpected keyword argument 'contxt'"):
        kdist.get("digits", contxt="a")  # type: ignore[call-arg]
    for name in ("x" * 300, "a/" + "x" * 300, "a/\0"):
        with pytest.raises(kdist.NotFoundError):
            kdist.get(name)
    job = kdist.load({"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob"} | DIGITS)
    with pytest.raises(UsageError, match=r"'spec\.nodes': 2.* is no text"):
        job.set({"spec.nodes": 2})  # type: ignore[arg-type]


DIGITS = {
    "metadata": {"name": "digits"},
    "spec": {"train": {"workload": "digits", "steps": 9}, "nodes": 2, "image": "r/i:1"},
}


def test_a_run_that_was_deleted_is_not_found(home: Path) -> None:
    run = make_run(home)
    run.delete()
    assert [path.name for path in (home / ".kdist" / "digits").iterdir()] == ["checkpoints"]
    for use in (run.status, run.wait, run.why, run.delete, run.events, lambda: list(run.logs())):
        with pytest.raises(kdist.NotFoundError, match=r"there is no run /.*digits"):
            use()
    assert run.wait("deleted") is None
    assert kdist.list_jobs() == []


def test_logs_are_as_they_were_printed_and_followed_until_the_time_out(home: Path) -> None:
    run = make_run(home)
    (home / ".kdist/digits/node-0").mkdir()
    (home / ".kdist/digits/node-0/log").write_text("[rank0]: a\x1b[31mred\x1b[0m b\n")
    assert list(run.logs()) == ["[rank0]: a\x1b[31mred\x1b[0m b"]
    with pytest.warns(kdist.KdistWarning, match="no line of rank 7 in the logs of digits"):
        assert list(run.logs(rank=7)) == []
    for bad in ({"rank": "0"}, {"tail": "x"}, {"tail": -1}):
        with pytest.raises(UsageError, match=r"is no number from 0"):
            list(run.logs(**bad))
    folder = run_dir.RunFolder.open("digits")
    with pytest.raises(KdistError, match="has not reached `done` after 0 s") as late:
        list(run.logs(follow=True, timeout=0.1))
    folder.close()
    assert late.value.code == Code.TIMEOUT


def test_a_rank_that_there_is_none_of_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(home)
    status = run.status()
    monkeypatch.setattr(LocalJob, "snapshot", lambda _: Seen(status, world_size=2))
    with pytest.raises(UsageError, match="no rank 7: digits has 2 ranks"):
        list(run.logs(rank=7))
    with pytest.warns(kdist.KdistWarning, match="no line of rank 1"):
        assert list(run.logs(rank=1)) == []


class Seen:
    """A snapshot with another size."""

    def __init__(self, status: kdist.JobStatus, *, world_size: int) -> None:
        from dataclasses import replace

        self.status = replace(status, world_size=world_size)


def test_what_a_cell_shows_is_short_and_says_where_a_job_is(home: Path) -> None:
    run = make_run(home)
    job = kdist.load({"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob"} | DIGITS)
    assert repr(run) == "<JobHandle digits on this machine>"
    assert repr(job) == "<JobDefinition digits: workload digits, nodes 2, image r/i:1>"
    assert repr(run.status()).startswith("<JobStatus digits: ")
    assert repr(run.why()).startswith("<Diagnosis ")
    assert all(len(repr(each)) < 300 for each in (run, job, run.status(), run.why()))


def test_names_and_signatures_stay_those_of_the_functions() -> None:
    assert kdist.get.__name__ == "get"
    assert "fresh" in inspect.signature(kdist.JobDefinition.apply).parameters
    assert inspect.isgeneratorfunction(kdist.JobHandle.logs)
    assert kdist.Code.NOT_FOUND is Code.NOT_FOUND
