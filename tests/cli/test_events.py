"""Events are recognized in logs, logs are tailed, and each event becomes a sentence or a line."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdist_trainer
from kdist import events
from kdist.events import (
    Entry,
    EventFilter,
    LogTail,
    describe_event,
    format_line,
    last_printed_line,
    parse,
    read_files,
    split_line,
)
from kdist.job.local import logs, progress
from kdist_trainer.formats.machine_faults import EXCLUDED

DONE = '{"time":"2026-01-31T12:00:00.000Z","event":"done","step":5}'


@pytest.mark.parametrize("line", [DONE, f"{DONE}\r"])
def test_an_event_is_a_line_of_its_own(line: str) -> None:
    event = parse(line)
    assert event is not None
    assert (event["event"], event["step"]) == ("done", 5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "done",
        '{"time": 1',
        '{"time": 1, "event": 5}',
        '{"event": "done"}',
        '{"time":' + "[" * 9**5,
        f"loading... {DONE}",
        f"[rank0]: {DONE}",
        f"[rank0]: x\r{DONE}",
        f"\x1b[2K{DONE}",
        f" {DONE}",
    ],
)
def test_what_is_not_an_event_is_printed_text(line: str) -> None:
    assert parse(line) is None
    assert split_line(line).printed == line.rsplit("\r", 1)[-1]


@pytest.mark.parametrize(
    ("line", "printed", "is_progress_bar"),
    [
        ("10%\r20%", "20%", False),
        ("10%\r20%\r", "20%", True),
        (DONE, "", False),
    ],
)
def test_a_progress_bar_is_reduced_to_its_last_state(
    line: str, printed: str, *, is_progress_bar: bool
) -> None:
    split = split_line(line)
    assert (split.printed, split.is_progress_bar) == (printed, is_progress_bar)


class Clock:
    """Time that only the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as opened:
        opened.write(data)


def event(name: str) -> bytes:
    return json.dumps({"time": "2026-01-31T12:00:00.000Z", "event": name, "level": "info"}).encode()


def shown(entries: list[Entry]) -> list[str]:
    """Events as `<name>`, prints as their text."""
    return [entry.text if entry.event is None else f"<{entry.event['event']}>" for entry in entries]


def test_events_and_prints_come_in_their_order(log: Path) -> None:
    tail = LogTail("node-0", log)
    append(log, b"hello\n" + event("first-step") + b"\nworld\n")
    assert shown(list(tail.read())) == ["hello", "<first-step>", "world"]
    assert list(tail.read()) == []


def test_a_log_that_is_not_there_yet_is_empty(log: Path) -> None:
    tail = LogTail("node-0", log)
    assert list(tail.read()) == []
    append(log, b"now\n")
    assert shown(list(tail.read())) == ["now"]


def test_what_an_earlier_invocation_wrote_is_not_reported_again(log: Path) -> None:
    append(log, b"old\n")
    tail = LogTail("node-0", log)
    append(log, b"new\n")
    assert shown(list(tail.read())) == ["new"]


@pytest.mark.parametrize("which", [1, 2, 3])
def test_nothing_is_lost_if_the_log_is_replaced_before_one_of_the_times_that_it_is_opened(
    log: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    tail = LogTail("node-0", log)
    append(log, b"a\n")
    assert shown(list(tail.read())) == ["a"]
    append(log, b"b\nc\n")
    new = log.with_name("new")
    append(new, b"d\n")
    opened: list[Path] = []
    plain = Path.open

    def open_later(path: Path, *options: Any) -> Any:
        opened.append(path)
        if len(opened) == which:
            log.rename(log.with_name(f"{log.name}.1"))
            new.rename(log)
        return plain(path, *options)

    monkeypatch.setattr(Path, "open", open_later)
    assert shown([*tail.read(), *tail.read()]) == ["b", "c", "d"]


def test_a_line_that_arrives_in_pieces_is_one_line(log: Path) -> None:
    tail = LogTail("node-0", log)
    whole = event("done") + b"\n"
    append(log, whole[:20])
    assert list(tail.read()) == []
    append(log, whole[20:])
    assert shown(list(tail.read())) == ["<done>"]


def test_what_looks_like_an_event_behind_a_print_is_part_of_the_print(log: Path) -> None:
    tail = LogTail("node-0", log)
    line = b"loading... " + event("worker-started")
    append(log, line + b"\n")
    assert shown(list(tail.read())) == [line.decode()]


def test_a_prompt_without_an_end_is_shown_after_a_second(log: Path, clock: Clock) -> None:
    tail = LogTail("node-0", log, clock=clock)
    append(log, b"epoch 1:")
    assert list(tail.read()) == []
    clock.now = 1.5
    assert shown(list(tail.read())) == ["epoch 1:"]


def test_the_last_look_leaves_nothing_behind(log: Path) -> None:
    tail = LogTail("node-0", log)
    append(log, b"Traceback\nValueError: boom")
    assert shown(list(tail.read(last=True))) == ["Traceback", "ValueError: boom"]


def test_a_progress_bar_is_shown_in_its_last_state(log: Path) -> None:
    tail = LogTail("node-0", log)
    append(log, b" 10%\r 50%\r100%\n")
    assert shown(list(tail.read())) == ["100%"]


def test_a_state_of_a_progress_bar_is_reported_from_its_last_one(log: Path) -> None:
    tail = LogTail("node-0", log)
    append(log, b"[rank3]:  50%\r\n[rank3]: 100%\n")
    reported = [(entry.prefix, entry.body, entry.is_progress_bar) for entry in tail.read()]
    assert reported == [("[rank3]:", " 50%", True), ("[rank3]:", "100%", False)]


@pytest.mark.parametrize("text", ["hello", "rank0: hello", "[rankx]: hello", ""])
def test_what_no_rank_has_printed_is_its_nodes(text: str) -> None:
    entry = Entry("node-1", None, text)
    assert (entry.prefix, entry.body) == ("[node-1]", text)


def test_bytes_that_are_no_text_hide_nothing(log: Path) -> None:
    tail = LogTail("node-0", log)
    append(log, b"\xff\xfe\n" + event("done") + b"\n")
    assert shown(list(tail.read())) == ["\ufffd\ufffd", "<done>"]


@pytest.mark.parametrize(
    "line",
    [b'{"time": 1', b'{"time": 1}', b'{"time": 1, "event": 5}', b'["event"]', b'{"event": "done"}'],
)
def test_json_that_is_no_event_is_a_print(log: Path, line: bytes) -> None:
    tail = LogTail("node-0", log)
    append(log, line + b"\n")
    assert shown(list(tail.read())) == [line.decode()]


def test_empty_lines_that_ranks_print_are_kept(log: Path) -> None:
    tail = LogTail("node-0", log)
    append(log, b"a\n\nb\n")
    assert shown(list(tail.read())) == ["a", "", "b"]


def test_a_flood_is_taken_in_portions_and_none_of_it_is_lost(log: Path) -> None:
    tail = LogTail("node-0", log)
    count = 100_000
    append(log, b"".join(b"line %06d of a flood\n" % number for number in range(count)))
    first = shown(list(tail.read()))
    assert 0 < len(first) < count
    rest = first
    while portion := shown(list(tail.read())):
        rest = rest + portion
    assert rest == [f"line {number:06d} of a flood" for number in range(count)]


def test_the_last_printed_line_is_found_behind_events(log: Path) -> None:
    assert last_printed_line(log) == ""
    append(log, b"Traceback\nImportError: no\n\n" + event("failed") + b"\n")
    assert last_printed_line(log) == "ImportError: no"


def test_the_logs_of_several_nodes_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    files = {node: tmp_path / node for node in ("node-0", "node-1")}
    for node, seconds in (("node-0", (1, 3)), ("node-1", (0, 2))):
        for second in seconds:
            document = {"time": f"2026-01-31T12:00:0{second}.000Z", "event": f"at-{second}"}
            append(files[node], json.dumps(document).encode() + b"\nafter %d\n" % second)
    found = shown(list(read_files(files)))
    assert found == [text for at in range(4) for text in (f"<at-{at}>", f"after {at}")]
    assert shown(list(read_files(files, tail=1))) == ["after 2", "after 3"]


TEXT = Path(events.__file__)
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
        (
            "restarting",
            {"restarts": 2, "budget": 10, "counted": "machines", "cause": "device"},
            "starts again, restart 2 of 10 after machine faults (device)",
        ),
        (
            "restarting",
            {"restarts": 3, "budget": None, "counted": "nothing", "cause": "user_code"},
            "starts again, restart 3, not counted (spec.restart.rules) (user_code)",
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


LOGGING = {"event", "warn", "error", "render", "write", "log_event", "on_event"}
"""What logs an event, whose name is its first argument or its second."""


def named_events() -> Iterator[str]:
    """Names that the trainer logs, and what watches its agents here."""
    for path in (*TRAINER.rglob("*.py"), TEXT.with_name("job") / "local/supervisor.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in LOGGING:
                for each in (part for given in call.args[:2] for part in ast.walk(given)):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield each.value
                    elif isinstance(each, ast.Name) and each.id == "EXCLUDED":
                        yield EXCLUDED


def test_every_event_that_the_command_line_knows_is_logged() -> None:
    known = {*events.SENTENCES, *events._SHOWN_FOR_EVERY_RANK, *events._NEVER_SHOWN}
    known |= {*progress._PHASES, *progress._FETCHING, *progress._LOGGED_FOR_ALL_RANKS}
    known |= {each.decode().strip('"') for each in (logs._FIRST_EVENT, logs._FETCHED_EVENT)}
    assert known - {*named_events()} == set()


# what a hostile pod may write as any field of an event
fields: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 10**299, 1e308, "", "x\x1b[2J", "nan", [], [1], [[]], {}, {"a": None}]
)


@given(st.sampled_from(sorted(events.SENTENCES)), st.data())
def test_an_event_is_described_whatever_its_fields_are(name: str, data: st.DataObject) -> None:
    source = Path(events.__file__).read_text()
    names = sorted(set(re.findall(r'e(?:\.get\(|\[)"?\'?([a-z_]+)', source)))
    event = {"event": name, **{each: data.draw(fields) for each in names}}
    assert isinstance(describe_event(event), str)
    assert format_line(Entry("node-0", event, "")).count(name)
    assert EventFilter(lines_only=True).should_show(event) in (True, False)
