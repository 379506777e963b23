"""The events of ranks: those that ranks have, of the rank that the agent knows, in its encoding."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdist_trainer
from kdist_trainer import log
from kdist_trainer.agent.logs import NAMES, RankEvents

SOURCES = Path(kdist_trainer.__file__).parent
# of these the agent or a container that fetches data or packages is the process
NOT_OF_RANKS = (
    "agent/",
    "fetch/",
    "install/",
    "metrics/exporter.py",
    "metrics/persistence.py",
    "rendezvous/exchange.py",
    "network/",
    "tracker/",
)


def written(line: bytes) -> bytes:
    events = RankEvents()
    events.begin(3, generation=2)
    (found,) = events.feed(line + b"\n")
    return found


def test_the_table_has_every_event_that_a_module_of_ranks_logs() -> None:
    logged = set()
    for path in SOURCES.rglob("*.py"):
        if path.relative_to(SOURCES).as_posix().startswith(NOT_OF_RANKS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "log.event",
                "log.warn",
                "log.error",
                "log_event",
                "event",  # of log itself
            }:
                logged.add(ast.literal_eval(node.args[0]))
    assert logged == NAMES


def test_an_event_is_encoded_again_with_the_rank_and_generation_of_the_agent() -> None:
    line = b'{"level": "info", "rank": 9, "generation": 0, "event": "done", "time": "x", "step": 1}'
    expected = '{"time":"x","event":"done","level":"info","rank":3,"generation":2,"step":1}\n'
    assert written(line).decode() == expected


@pytest.mark.parametrize(
    "line",
    [
        '{"time":"x","event":"failed","level":"error"}',
        '{"time":"x","event":"agent-ended","level":"info"}',
        '{"time":"x","event":["done"],"level":"info"}',
        '{"time":5,"event":"done","level":"info"}',
        '{"time":"x","event":"done","level":"\x1b[31m"}',
        '{"time":"x","event":"done","level":"info","a":' + "[" * 3_000,
        "done",
        "",
    ],
)
def test_anything_else_is_text_of_the_rank(line: str) -> None:
    assert written(line.encode()) == b"[rank3]: " + line.encode() + b"\n"


@given(st.lists(st.binary() | st.sampled_from([b"\n", b"{", b'{"time":"x","event":"done"'])))
def test_whatever_a_rank_writes_each_line_is_bounded_and_an_event_or_has_its_prefix(
    pieces: list[bytes],
) -> None:
    events = RankEvents()
    events.begin(3, generation=2)
    found = [line for piece in pieces for line in events.feed(piece)] + events.finish()
    for line in found:
        assert line.endswith(b"\n")
        assert line.startswith(b"[rank3]: ") or json.loads(line)["rank"] == 3
    assert sum(map(len, found)) <= sum(map(len, pieces)) + 200 * (len(pieces) + 1) * 20


def test_a_line_without_an_end_is_not_kept() -> None:
    events = RankEvents()
    events.begin(3, generation=2)
    (found,) = events.feed(b"x" * (log.MAX_LINE + 1))
    assert len(found) < log.MAX_LINE + 20
    assert events.finish() == []
