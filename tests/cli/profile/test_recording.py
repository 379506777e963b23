"""Profiles from pods that cannot be trusted: what they say is read, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import KdistError
from kdist.profile import recording

PLAN = {"ranks": [0], "first": 3, "last": 4}
SUMMARY = {"rank": 0, "first": 3, "last": 4, "seconds": 0.5, "communicationSeconds": 0.1}


def record(plan: Any, summary: Any, folder: Path) -> Sequence[Any]:
    """Record with an agent that answers so."""
    answers = {"ask": {"name": "p"}, "look": {"plan": plan, "ranks": {"0": summary}}}

    def tool(arguments: Sequence[str]) -> bytes:
        return json.dumps(answers.get(arguments[0])).encode()

    return recording.record(
        [tool], folder, steps=2, ranks="all", timeout=5.0, notify=lambda _: None
    )


def test_what_a_rank_recorded_becomes_a_row(tmp_path: Path) -> None:
    rows = recording.rank_rows(record(PLAN, SUMMARY, tmp_path))
    assert rows == [("0", "3-4", "250.00 ms", "20%")]


@pytest.mark.parametrize("ranks", ["all", [None], ["../../x"], [-1], [1e9], [True], {}])
def test_ranks_that_are_none_are_refused(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(KdistError, match="cannot be read"):
        record({**PLAN, "ranks": ranks}, SUMMARY, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "odd", [{"seconds": "x"}, {"first": None}, {"last": []}, {"communicationSeconds": "NaN"}]
)
def test_a_summary_that_is_none_is_refused(odd: Any, tmp_path: Path) -> None:
    with pytest.raises(KdistError, match="cannot be read"):
        record(PLAN, {**SUMMARY, **odd}, tmp_path)


def test_operations_that_are_none_are_left_out(tmp_path: Path) -> None:
    odd = [None, 1, {"name": 7, "calls": "many"}, {"name": "add", "calls": 2, "cpuSeconds": 0.25}]
    summaries = record(PLAN, {**SUMMARY, "operations": odd}, tmp_path)
    rows = recording.operation_rows(summaries)
    assert rows[0] == ("add", "2", "250.0 ms", "-", "50%")
