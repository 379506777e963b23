"""When agents were up, from what they wrote into their logs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from kdist.job.local.logs import starts


def write_log(root: Path, node: str, *lines: tuple[str, float]) -> None:
    (root / node).mkdir(parents=True)
    printed = [
        {
            "time": datetime.fromtimestamp(at, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "event": event,
        }
        for event, at in lines
    ]
    (root / node / "log").write_text(
        "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in printed)
    )


def test_the_first_word_of_each_agent_in_each_life_is_when_it_was_up(tmp_path: Path) -> None:
    again = ("rendezvous-started", 130.0)  # after a failure
    write_log(
        tmp_path,
        "node-0",
        ("rendezvous-started", 103.5),
        ("rendezvous-completed", 104.0),
        again,
        ("rendezvous-started", 205.25),
    )
    write_log(tmp_path, "node-1", ("rendezvous-started", 103.75))
    lives = [(100.0, 150.0), (200.0, None)]
    assert list(starts(tmp_path, lives)) == [
        (100.0, None, 103.5),
        (200.0, None, 205.25),
        (100.0, None, 103.75),
    ]
    for name, at in (("fetch-data-0", 101.0), ("fetch-init", 102.5)):
        write_log(tmp_path, name, ("data-fetch", at - 0.5), ("data-ready", at))
    fetched = [each[1] for each in starts(tmp_path, lives)]
    assert fetched == [102.5, None, 102.5], "all that was fetched in that life"


def test_logs_that_are_not_there_or_not_whole_say_nothing(tmp_path: Path) -> None:
    write_log(tmp_path, "node-0")
    (tmp_path / "node-0" / "log").write_text(
        '{"event":"rendezvous-started"}\nnot "rendezvous-started"\n'
    )
    assert list(starts(tmp_path, [(0.0, None)])) == []
    assert list(starts(tmp_path / "nowhere", [(0.0, None)])) == []
