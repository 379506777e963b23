"""Spans of steps count the same seconds and steps as a line for each step would."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.ledger import Span, build_report, overlay, read_spans, sum_seconds
from kdist.report.goodput import build_goodput_report
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.step_lines import StepLines
from tests.cli.test_ledger import commit, failure, first_step, generation, step


def span(first: int, last: int, loss: str = "") -> Span:
    return Span(1, first, last, float(last - first + 1), 0.0, loss, last)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), max_size=12))
def test_of_steps_that_occur_again_the_last_one_counts(ranges: list[tuple[int, int]]) -> None:
    spans = [span(first, first + more, str(at)) for at, (first, more) in enumerate(ranges)]
    expected = {one: each.loss for each in spans for one in range(each.first, each.last + 1)}
    found = overlay(spans)
    assert [one for each in found for one in range(each.first, each.last + 1)] == sorted(expected)
    assert {
        one: each.loss for each in found for one in range(each.first, each.last + 1)
    } == expected
    assert sum_seconds(found) == pytest.approx(len(expected))
    assert sum_seconds(found, 20) == pytest.approx(sum(one <= 20 for one in expected))


def test_a_record_of_more_steps_than_there_can_be_is_of_those_from_the_first_on() -> None:
    read = read_spans([{"generation": 1, "step": 5, "steps": 10**12}, {"step": 3}])
    assert [(one.first, one.last, one.steps) for one in read] == [(1, 5, 5)]


@pytest.mark.sampled
def test_a_long_run_with_losses_has_the_report_of_its_single_lines() -> None:
    draw = random.Random(5)
    events, lines, at, now = [], [], 0, 1000.0
    for number in range(1, 6):
        reason = "failure" if number > 1 else "start"
        events += [
            generation(number, reason, now, from_step=at),
            first_step(number, now + 1, at + 1),
        ]
        done = draw.randint(2500, 6000)
        waits = {"wait_seconds": 0.002}
        new = [
            step(n, number, loss=1 / n, seconds=round(draw.uniform(0.005, 0.02), 6)) | waits
            for n in range(at + 1, at + done + 1)
        ]
        lines += new
        now += 1 + sum(one["seconds"] for one in new)
        saved = at + done - draw.randint(0, 2000)
        if number < 5:
            events += [commit(saved, now - 1), failure(number, now, step=at + done)]
        at, now = saved, now + 0.5
    reader = StepLines(events, most=500)
    reader.add(b"".join(encode_json(one, separators=(",", ":")).encode() + b"\n" for one in lines))
    merged = reader.records()
    assert len(merged) < len(lines) / 2
    active = [(1000.0, now)]
    for unsaved in (False, True):
        one, other = (
            build_report(events, steps, invocations=active, unsaved=unsaved)
            for steps in (lines, merged)
        )
        assert_alike(one, other)
    one, other = (build_goodput_report(events, steps, active=active) for steps in (lines, merged))
    curves = [report.pop("lossCurve") for report in (one, other)]
    assert_alike(one, other)
    assert curves[0][-1] == curves[1][-1]
    for at_step, loss in curves[1]:
        assert loss == 1 / at_step, "a point is a step's own loss"


def assert_alike(one: Any, other: Any) -> None:
    """The same, up to the rounding of sums."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_alike(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for each, of_other in zip(one, other, strict=True):
            assert_alike(each, of_other)
    else:
        close = isinstance(one, float)
        assert (other == pytest.approx(one, rel=1e-6, abs=0.01)) if close else other == one
