"""The events of a long run stay few, and tell the same of it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from kdist.ledger import build_report, parse_lines
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.interval import read_history
from kdist_trainer.checkpoint.ledger import (
    MOST_BYTES,
    RunLedger,
    count_bytes_written,
    count_commits,
    find_files,
    shorten,
)
from kdist_trainer.formats import EVENTS_FILE, LEDGER
from kdist_trainer.formats.json_text import encode_json
from tests.trainer.checkpoint import test_object_store
from tests.trainer.checkpoint.test_object_store import root_of
from tests.trainer.object_store.s3_server import S3Server

server = test_object_store.server


def long_run(generations: int, *, commits: int) -> list[dict[str, Any]]:
    """A run that loses a rank again and again, each time after some saves."""
    events: list[dict[str, Any]] = []
    at, step = 1000.0, 0
    for number in range(1, generations + 1):
        reason = "start" if number == 1 else "failure"
        events.append(
            {
                "time": at,
                "event": "generation",
                "generation": number,
                "reason": reason,
                "world_size": 2,
                "nodes": ["node-0", "node-1"],
                "from_step": step,
            }
        )
        first = {"time": at + 5, "event": "first_step", "generation": number, "step": step + 1}
        events.append(first)
        for _ in range(commits):
            at, step = at + 10, step + 10
            events.append(
                {
                    "time": at,
                    "event": "commit",
                    "step": step,
                    "seconds": 0.5,
                    "visible_seconds": 0.25,
                    "bytes": 1000,
                }
            )
        at += 3
        failure = {"generation": number, "cause": "signal", "rank": 1, "node": "node-1"}
        events.append({"time": at, "event": "failure", **failure, "step": step + 3})
    return events


def write(root: Path, events: list[dict[str, Any]]) -> Path:
    path = root / LEDGER / EVENTS_FILE
    path.parent.mkdir(parents=True)
    path.write_text("".join(encode_json(each) + "\n" for each in events))
    return path


def summed(events: Any) -> dict[str, Any]:
    text = "".join(encode_json(each) + "\n" for each in events)
    report = build_report(
        list(parse_lines(BytesIO(text.encode()))), [], invocations=[(1000.0, 99_000.0)]
    )
    return {name: report[name] for name in ("checkpoints", "restarts", "recoverySeconds")}


def test_a_shortened_ledger_tells_the_same_of_losses_restarts_and_saves() -> None:
    events = long_run(200, commits=40)
    short = shorten(events)
    assert len(short) < 1000 < len(events)
    assert summed(short) == summed(events)
    assert summed(short)["checkpoints"]["committed"] == 8000
    assert read_history(short) == read_history(events)
    assert shorten(short) == short, "shortened again it stays as it is"
    assert [one for one in short if one["event"] == "commit"][-100:] == [
        one for one in events if one["event"] == "commit"
    ][-100:]


def test_however_long_a_run_is_its_events_are_bounded(tmp_path: Path) -> None:
    events = long_run(4000, commits=2)
    path = write(tmp_path, events)
    assert path.stat().st_size > MOST_BYTES
    assert RunLedger(tmp_path).bound()
    assert path.stat().st_size < MOST_BYTES / 2
    kept = RunLedger(tmp_path).events()
    assert kept[-1] == events[-1]
    assert RunLedger(tmp_path).last_generation() == 4000
    assert not RunLedger(tmp_path).bound()


def test_what_an_agent_appends_while_the_events_are_written_again_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, long_run(100, commits=100))
    replace = storage.replace

    def append_and_replace(target: Any, data: bytes) -> None:
        RunLedger(tmp_path).append("generation", generation=101, reason="join")
        replace(target, data)

    monkeypatch.setattr(storage, "replace", append_and_replace)
    assert path.stat().st_size > MOST_BYTES
    assert RunLedger(tmp_path).bound()
    assert RunLedger(tmp_path).last_generation() == 101


def test_a_ledger_that_cannot_be_written_again_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, long_run(100, commits=100))
    before = path.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(storage, "replacing", refuse)
    with pytest.raises(OSError, match="no space"):
        RunLedger(tmp_path).bound()
    assert path.read_bytes() == before


def test_the_events_of_a_process_that_saves_for_months_stay_few(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist_trainer.checkpoint.ledger._SEGMENT_BYTES", 30_000)
    root = root_of(server)
    ledger = RunLedger(root)
    ledger.append("generation", generation=1, reason="start")
    for step in range(1, 1001):
        ledger.append("commit", step=step, seconds=0.5, visible_seconds=0.25, bytes=1000)
        assert not ledger.bound(), "no other process's objects are written"
    assert sum(find_files(root / LEDGER / EVENTS_FILE).values()) < 30_000
    assert len(find_files(root / LEDGER / EVENTS_FILE)) == 1
    events = ledger.events()
    assert [one["event"] for one in events][:2] == ["generation", "commit"]
    commits = events[1:]
    assert sum(count_commits(one) for one in commits) == 1000
    assert sum(count_bytes_written(one) for one in commits) == 1_000_000
    assert [one["step"] for one in commits[-100:]] == list(range(901, 1001))
