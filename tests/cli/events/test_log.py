"""The tail of a log in which events and whatever ranks print are mixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdist.events import Entry, LogTail, last_printed_line, read_files


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
