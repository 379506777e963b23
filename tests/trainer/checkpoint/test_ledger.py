"""The run's step log: what a torn line, a dead writer and a roll-back leave in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger, read_lines
from kdist_trainer.formats import EVENTS_FILE, LEDGER, STEPS_FILE


def test_events_come_back_in_order_with_their_fields_and_a_time(tmp_path: Path) -> None:
    ledger = RunLedger(tmp_path / "run")
    ledger.append("generation", generation=1, reason="start", nodes=["node-0"])
    ledger.append("commit", step=5, seconds=0.25)
    events = ledger.events()
    assert [one["event"] for one in events] == ["generation", "commit"]
    assert events[0]["nodes"] == ["node-0"]
    assert events[0]["time"] <= events[1]["time"]


def test_a_run_that_has_not_begun_has_an_empty_step_log(tmp_path: Path) -> None:
    ledger = RunLedger(tmp_path / "nowhere")
    assert ledger.events() == []
    assert read_lines(tmp_path / "nowhere" / LEDGER / STEPS_FILE) == []
    assert ledger.last_generation() == 0
    assert not (tmp_path / "nowhere").exists(), "reading must not make the folder"


@pytest.mark.parametrize(
    "torn",
    [
        b'{"event":"commit","st',
        b'{"event":"commit","step":7}',
        b"\xff\xfe\x00garbage",
        b"[1,2]\n",
        b"\n\n",
    ],
)
def test_a_line_torn_by_a_dead_writer_costs_that_line_and_no_other(
    tmp_path: Path, torn: bytes
) -> None:
    ledger = RunLedger(tmp_path)
    ledger.append("generation", generation=3, reason="start")
    with (tmp_path / LEDGER / EVENTS_FILE).open("ab") as file:
        file.write(torn)
    before = [one for one in ledger.events() if one.get("step") != 7]
    assert [one["generation"] for one in before] == [3]
    ledger.append("generation", generation=4, reason="failure")
    assert ledger.last_generation() == 4


def test_the_step_ledger_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / LEDGER / STEPS_FILE
    first = StepLedger(tmp_path)
    first.append([{"step": 1, "loss": (0.1).hex()}, {"step": 2, "loss": (0.2).hex()}])
    first.close()
    os.truncate(path, path.stat().st_size - 5)
    second = StepLedger(tmp_path)
    second.append([{"step": 2, "loss": (0.3).hex()}])
    second.sync()
    second.close()
    second.close()
    assert [
        (one["step"], float.fromhex(one["loss"]))
        for one in read_lines(tmp_path / LEDGER / STEPS_FILE)
    ] == [(1, 0.1), (2, 0.3)]


def test_lines_of_writers_at_work_at_once_do_not_mix(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kdist_trainer.checkpoint.ledger "
        "import RunLedger\n"
        "for n in range(50): RunLedger(Path(sys.argv[1])).append('x', writer=sys.argv[2], "
        "n=n, text='y' * 500)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(one)])
        for one in range(3)
    ]
    assert [one.wait(timeout=60) for one in writers] == [0, 0, 0]
    events = RunLedger(tmp_path).events()
    for writer in ("0", "1", "2"):
        assert [one["n"] for one in events if one["writer"] == writer] == list(range(50))


def test_agents_can_read_ledger_layout_and_lock_without_torch() -> None:
    program = (
        "import sys, kdist_trainer.checkpoint.ledger, kdist_trainer.checkpoint.manifest, "
        "kdist_trainer.checkpoint.lock,"
        " kdist_trainer.checkpoint.manifest, kdist_trainer.checkpoint.commit, "
        "kdist_trainer.checkpoint.commit\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
