"""The way of a rank's output into its agent's log, which nobody ever waits for."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kdist_trainer.agent import logs
from kdist_trainer.agent.logs import LogRelay, RankLines
from kdist_trainer.ipc.output import pipe_path
from tests.patience import soon

AGENT = """
import contextlib, os, pathlib, subprocess, sys
from kdist_trainer import log
from kdist_trainer.agent.logs import LogRelay

scratch, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
with contextlib.closing(LogRelay(scratch, ranks=2)) as relay:
    relay.begin([6, 7])
    code = "import os, pathlib, sys; from kdist_trainer.ipc import output; "
    code += f"output.redirect(pathlib.Path({str(scratch)!r}), 1); "
    log.event("first", code=subprocess.run([sys.executable, "-c", code + rank]).returncode)
    log.event("last")
    (scratch / "well").touch()
"""


@contextmanager
def agent(scratch: Path, rank: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent whose rank 7 runs these statements; its output is a pipe."""
    command = [sys.executable, "-c", AGENT, str(scratch), "\n" + textwrap.dedent(rank)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def reported(output: bytes) -> list[str]:
    """The lines, events by their names."""
    lines = output.decode().splitlines()
    return [json.loads(line)["event"] if line.startswith("{") else line for line in lines]


def test_what_a_rank_its_children_and_native_code_print_stands_before_the_news_of_its_end(
    tmp_path: Path,
) -> None:
    rank = """
        print("mine", flush=True)
        import ctypes, subprocess
        subprocess.run(["echo", "my child's"])
        ctypes.CDLL(None).printf(b"native\\n")
        ctypes.CDLL(None).fflush(None)
        print("error", file=sys.stderr, flush=True)
        os._exit(3)
    """
    with agent(tmp_path, rank) as process:
        lines = reported(process.communicate(timeout=60)[0])
    assert lines[-2:] == ["first", "last"]
    assert sorted(lines[:-2]) == [
        f"[rank7]: {text}" for text in ("error", "mine", "my child's", "native")
    ]


@pytest.mark.sampled
def test_neither_ranks_nor_their_agent_wait_for_a_reader_that_has_stopped_reading(
    tmp_path: Path,
) -> None:
    flood = (
        'for number in range(400_000): sys.stdout.write(f"line {number:06d} of a flood that '
        'nobody reads\\n")'
    )
    with agent(tmp_path, flood) as process:
        assert soon((tmp_path / "well").exists, 60), "the rank, and with it its agent, waits"
        assert process.wait(60) == 0, "its end waits for nobody either"
        assert process.stdout is not None
        lines = reported(process.stdout.read())
    assert lines[0] == "[rank7]: line 000000 of a flood that nobody reads"


def test_a_flood_that_is_read_arrives_whole_and_in_order(tmp_path: Path) -> None:
    flood = 'for number in range(100_000): sys.stdout.write(f"{number}\\n")'
    with agent(tmp_path, flood) as process:
        lines = reported(process.communicate(timeout=60)[0])
    assert lines == [*(f"[rank7]: {number}" for number in range(100_000)), "first", "last"]


EVENT = '{"time":"x","event":"%s","level":"info","rank":0,"step":5}'


def test_what_a_rank_prints_is_never_an_event_and_what_it_logs_has_the_rank_of_its_agent(
    tmp_path: Path,
) -> None:
    rank = f"""
        from kdist_trainer import log
        print({EVENT % "failed"!r}, flush=True)
        print("no newline", {EVENT % "progress"!r}, flush=True)
        log.event("progress", step=7, rank=99, job="other")
        log.error("failed", cause="forged")
        os.write(2, b'{{"time":"x","event":"done"}}\\n')
    """
    with agent(tmp_path, rank) as process:
        lines = process.communicate(timeout=60)[0].decode().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [event["event"] for event in events] == ["progress", "first", "last"]
    assert (events[0]["rank"], events[0]["step"]) == (7, 7)
    printed = [line for line in lines if not line.startswith("{")]
    assert len(printed) == 4
    assert all(line.startswith("[rank7]: ") for line in printed)


def test_no_line_of_a_rank_ends_the_relay(tmp_path: Path) -> None:
    rank = """
        print('{"time":"x","event":"x","a":' + "[" * 5000, flush=True)
        from kdist_trainer import log
        from kdist_trainer.ipc.output import EVENTS, pipe_path
        with pipe_path(pathlib.Path(sys.argv[1]), 1, EVENTS).open("wb") as events:
            events.write(b'{"time":"x","event":"x","a":' + b"[" * 5000 + b"\\n")
            events.write(bytes(range(256)) * 1000)
            events.write(b'\\n{"event": 5}\\n[]\\n{"event": ["progress"], "level": {}}\\n')
        for number in range(40_000):
            print(f"line {number} " + "y" * 90)
        log.event("stopped", step=1)
    """
    with agent(tmp_path, rank.replace("sys.argv[1]", repr(str(tmp_path)))) as process:
        output = process.communicate(timeout=60)[0]
    lines = output.split(b"\n")
    assert [line for line in lines if line.startswith(b"[rank7]: line 39999 y")]
    assert [json.loads(line)["event"] for line in lines if line.startswith(b"{")] == [
        "stopped",
        "first",
        "last",
    ]


def test_an_unexpected_error_of_the_relay_is_logged_and_the_pipe_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(logs, "_write_whole", lambda _, data: written.append(data))
    feed = RankLines.feed

    def fail_at_mark(lines: RankLines, data: bytes) -> list[bytes]:
        if b"mark" in data:
            raise RuntimeError("not foreseen")
        return feed(lines, data)

    monkeypatch.setattr(RankLines, "feed", fail_at_mark)
    with closing(LogRelay(tmp_path, ranks=1)) as relay:
        relay.begin([4])
        with pipe_path(tmp_path, 0, 1).open("wb", buffering=0) as pipe:
            pipe.write(b"mark\n")
            assert soon(lambda: b"log-relay-failed" in b"".join(written), 30)
            pipe.write(b"goes on\n")
            assert soon(lambda: b"[rank4]: goes on\n" in b"".join(written), 30)
    failed = next(line for line in b"".join(written).split(b"\n") if b"log-relay-failed" in line)
    assert "RuntimeError: not foreseen" in json.loads(failed)["message"]


def test_a_training_that_closes_all_descriptors_gets_no_events_into_its_files(
    tmp_path: Path,
) -> None:
    rank = f"""
        from kdist_trainer import log
        os.closerange(3, 100)
        file = os.open({str(tmp_path / "mine")!r}, os.O_CREAT | os.O_RDWR)
        for _ in range(20):
            os.dup(file)
        log.event("progress", step=7)
    """
    with agent(tmp_path, rank) as process:
        lines = reported(process.communicate(timeout=60)[0])
    assert lines == ["first", "last"]
    assert (tmp_path / "mine").read_bytes() == b""
