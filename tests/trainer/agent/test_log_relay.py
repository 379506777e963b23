"""The way of a rank's output into its agent's log, which nobody ever waits for."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import soon

AGENT = """
import os, pathlib, subprocess, sys
from kdist_trainer import log
from kdist_trainer.agent.log_relay import LogRelay

scratch, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
with LogRelay(scratch, ranks=2) as relay:
    relay.begin([6, 7])
    code = "import os, pathlib, sys; from kdist_trainer import output; "
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
