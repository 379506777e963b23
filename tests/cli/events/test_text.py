"""The lines that show a job's events outside a live view, and which events become lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdist_trainer
from kdist.events import Entry, EventFilter, describe_event, format_line, text

TEXT = Path(text.__file__)
CLI = TEXT.parents[1]
TRAINER = Path(kdist_trainer.__file__).parent
TIME = "2026-01-31T12:00:01.123Z"


def formatted(name: str, node: str = "node-0", **fields: Any) -> str:
    return format_line(Entry(node, {"time": TIME, "event": name, "level": "info", **fields}, ""))


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "rendezvous-completed",
            {"world_size": 2, "nodes": 2, "generation": 1, "reason": "start"},
            "2 ranks on 2 nodes, generation 1 (start)",
        ),
        (
            "rendezvous-completed",
            {"world_size": 1, "nodes": 1, "generation": 3, "reason": "failure"},
            "1 rank on 1 node, generation 3 (failure)",
        ),
        (
            "resumed",
            {"step": 100, "samples_seen": 25600},
            "resumed after step 100, 25,600 samples seen",
        ),
        (
            "continued",
            {"step": 100, "samples_seen": 25600, "source_rank": 1},
            "continues after step 100 with the state that rank 1 has kept",
        ),
        (
            "worker-prepared",
            {"pid": 4711, "seconds": 1.5},
            "pid 4711 is ready to join the group after 1.5 s",
        ),
        (
            "data-fetch",
            {"url": "s3://bucket/a", "files": 2, "bytes": 3_000_000, "cached_bytes": 1_000_000},
            "fetches s3://bucket/a: 2 files, 3 MB, of which 1 MB are here",
        ),
        (
            "data-fetch",
            {"url": "https://host/a", "files": 1, "bytes": None, "cached_bytes": 0},
            "fetches https://host/a: 1 file",
        ),
        (
            "data-progress",
            {"done_bytes": 12 * 10**9, "total_bytes": 200 * 10**9, "bytes_per_second": 80_000_000},
            "12 of 200 GB, 80 MB/s",
        ),
        ("data-progress", {"done_bytes": 12 * 10**6}, "12 MB"),  # of a server that gives no size
        (
            "data-retry",
            {"file": "a", "reason": "status 503", "seconds": 2.0},
            "tries again in 2.0 s: status 503",
        ),
        (
            "data-ready",
            {"files": 2, "bytes": 3_000_000, "folder": "/fetch/files", "seconds": 4.0},
            "2 files, 3 MB, in /fetch/files",
        ),
        ("data-failed", {"reason": "spec.data[0]: not found"}, "spec.data[0]: not found"),
        (
            "node-standby",
            {},
            "the group has all its nodes; this one stands by for one that is lost",
        ),
        (
            "standby-ready",
            {"pid": 4711, "seconds": 1.5},
            "the standby is ready after 1.5 s, pid 4711",
        ),
        (
            "standby-used",
            {"pid": 4711},
            "the standby takes the place of a rank that was lost, pid 4711",
        ),
        (
            "progress",
            {
                "step": 10,
                "target": 100,
                "loss": 0.123456,
                "learning_rate": 1e-3,
                "samples_per_second": 1234.5,
            },
            "step 10/100, loss 0.1235, 1,234 samples/s, learning rate 0.001",
        ),
        ("progress", {"step": 10, "loss": "nan"}, "step 10, loss nan"),
        (
            "checkpoint-committed",
            {"step": 50, "seconds": 0.213, "visible_seconds": 0.0031, "bytes": 1_258_291},
            "step 50 committed in 0.21 s, the training waited 3 ms (1.2 MiB)",
        ),
        (
            "save-interval",
            {"seconds": 84.9, "cost_seconds": 1.0, "between_losses_seconds": 3600.0},
            "saves every 1:25: a save costs 1.0 s of training, and losses that go back to a "
            "checkpoint are 1:00:00 apart",
        ),
        (
            "worker-failed",
            {"rank": 1, "cause": "signal", "signal": "SIGKILL"},
            "rank 1 ended by SIGKILL (signal)",
        ),
        (
            "worker-failed",
            {"rank": 0, "cause": "user_code", "code": 1, "message": "ValueError: x"},
            "rank 0 ended with code 1 (user_code): ValueError: x",
        ),
        (
            "worker-failed",
            {"rank": 0, "cause": "node_lost", "code": 1, "primary": False},
            "rank 0 lost its peers (node_lost)",
        ),
        (
            "worker-failed",
            {"rank": 0, "cause": "hang", "message": "one\ntwo"},
            "rank 0 ended (hang): one",
        ),
        (
            "restarting",
            {"restarts": 1, "budget": 10, "cause": "signal"},
            "starts again, restart 1 of 10 (signal)",
        ),
        ("stopped", {"step": 7}, "stopped after step 7, state saved"),
        ("evaluated", {"metrics": {"accuracy": 0.975}}, "accuracy 0.975"),
        ("agent-ended", {"code": -9}, "agent ended by signal 9"),
        (
            "hang",
            {"rank": 1, "phase": "step", "collective": "all_reduce"},
            "rank 1 hangs in step, inside all_reduce",
        ),
    ],
)
def test_an_event_is_described_in_a_sentence(
    name: str, fields: dict[str, Any], sentence: str
) -> None:
    assert describe_event({"event": name, **fields}) == sentence


def test_a_line_has_time_node_and_name_in_fixed_columns() -> None:
    expected = "2026-01-31T12:00:01Z node-0 stopped               stopped after step 7, state saved"
    assert formatted("stopped", step=7) == expected


def test_what_a_rank_prints_carries_its_node() -> None:
    assert format_line(Entry("node-1", None, "hello")) == "[node-1] hello"
    assert format_line(Entry("node-1", None, "[rank3]:  hello")) == "[rank3]:  hello"


def test_an_event_without_a_sentence_is_described_by_its_fields() -> None:
    assert (
        describe_event(
            {"event": "new-thing", "level": "info", "message": "Look.", "size": 3, "words": ["a"]}
        )
        == 'Look. size=3 words=["a"]'
    )


def test_an_event_that_lacks_its_fields_is_still_described() -> None:
    assert describe_event({"event": "checkpoint-committed", "step": 5}) == "step=5"


def test_an_event_that_every_agent_logs_is_shown_once() -> None:
    event_filter = EventFilter(lines_only=True)
    formed = {"event": "rendezvous-completed", "world_size": 2, "nodes": 2, "generation": 1}
    assert [
        event_filter.should_show(event)
        for event in (formed, dict(formed), {**formed, "generation": 2})
    ] == [True, False, True]


def test_other_ranks_than_rank_0_are_shown_only_when_they_fail() -> None:
    event_filter = EventFilter(lines_only=True)
    assert not event_filter.should_show({"event": "resumed", "rank": 1, "step": 3})
    assert event_filter.should_show({"event": "worker-failed", "rank": 1, "cause": "hang"})


def test_progress_is_shown_less_often_the_longer_it_lasts() -> None:
    now = 0.0
    event_filter = EventFilter(lines_only=True, clock=lambda: now)
    shown = []
    for second in range(1, 1801):
        now = float(second)
        if event_filter.should_show({"event": "progress", "step": second, "loss": 1.0}):
            shown.append(second)
    assert len([at for at in shown if at <= 60]) == 30
    assert len([at for at in shown if 600 < at <= 1800]) == 20


def test_the_live_view_shows_progress_itself() -> None:
    event_filter = EventFilter(lines_only=False)
    assert not event_filter.should_show({"event": "progress", "step": 1, "loss": 1.0})
    assert not event_filter.should_show({"event": "waiting", "message": "x"})


def test_every_event_that_has_a_sentence_or_a_rule_is_logged_somewhere() -> None:
    sources = [path for root in (CLI, TRAINER) for path in root.rglob("*.py") if path != TEXT]
    logged = "\n".join(path.read_text() for path in sources)
    known = {*text.SENTENCES, *text._SHOWN_FOR_EVERY_RANK, *text._NEVER_SHOWN}
    assert [name for name in sorted(known) if f'"{name}"' not in logged] == []


# what a hostile pod may write as any field of an event
fields: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 10**299, 1e308, "", "x\x1b[2J", "nan", [], [1], [[]], {}, {"a": None}]
)


@given(st.sampled_from(sorted(text.SENTENCES)), st.data())
def test_an_event_is_described_whatever_its_fields_are(name: str, data: st.DataObject) -> None:
    source = Path(text.__file__).read_text()
    names = sorted(set(re.findall(r'e(?:\.get\(|\[)"?\'?([a-z_]+)', source)))
    event = {"event": name, **{each: data.draw(fields) for each in names}}
    assert isinstance(describe_event(event), str)
    assert format_line(Entry("node-0", event, "")).count(name)
    assert EventFilter(lines_only=True).should_show(event) in (True, False)
