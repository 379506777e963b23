"""`kdist profile` of a training at work on this machine, and what it says where there is nothing to
profile.
"""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

import pytest

from kdist.errors import KdistError
from kdist.profile import recording
from tests.cli.conftest import Kdist
from tests.cli.running import Start, read_ledger, write_job

SUMMARY = {
    "rank": 3,
    "first": 11,
    "last": 15,
    "seconds": 0.5,
    "communicationSeconds": 0.1,
    "operations": [
        {"name": "aten::mm", "calls": 10, "cpuSeconds": 0.2, "deviceSeconds": 0.0},
        {"name": "aten::add", "calls": 4, "cpuSeconds": 0.3, "deviceSeconds": 0.0},
    ],
}


@pytest.mark.sampled
@pytest.mark.processes
def test_the_traces_of_chosen_ranks_come_and_the_training_goes_on(
    start: Start, kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(write_job(tmp_path, steps=100_000, checkpoint=100_000))
    folder = run.folder("digits")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    run.wait_until(lambda: len(read_ledger(folder, "steps")) > 5, "first steps")
    shown = kdist("profile", "digits", "--steps", "3", "--ranks", "1", "--local", "--out", "traces")
    assert shown.exit_code == 0, shown.stderr
    assert "1 trace in traces" in shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:2]] == ["1"]
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "rank-1.trace.json.gz"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    seen = len(read_ledger(folder, "steps"))
    run.wait_until(lambda: len(read_ledger(folder, "steps")) > seen, "steps after the profile")
    run.process.send_signal(signal.SIGINT)
    run.wait(130)


def test_a_run_that_is_not_at_work_cannot_be_profiled(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kdist("profile", "digits", "--local").exit_code == 4
    assert kdist("profile", "digits", "--ranks", "1,x").exit_code == 2
    refused = kdist("profile", "digits", "-o", "traces")
    assert (refused.exit_code, "with --out traces" in refused.stderr) == (2, True)


def test_the_tables_say_the_pace_the_share_of_collectives_and_what_took_longest() -> None:
    assert recording.rank_rows([SUMMARY]) == [("3", "11-15", "100.00 ms", "20%")]
    rows = recording.operation_rows([SUMMARY, SUMMARY])
    expected = [("aten::add", "8", "600.0 ms"), ("aten::mm", "20", "400.0 ms")]
    assert [row[:3] for row in rows] == expected
    assert [row[4] for row in rows] == ["60%", "40%"]


def test_an_answer_that_is_no_answer_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(KdistError, match="cannot be read"):
        recording.record([lambda _: b"[]"], tmp_path, steps=1, ranks="", timeout=1, notify=print)
