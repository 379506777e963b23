"""However many lines a ledger of steps has, what is made of them is bounded, with exact sums."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.formats import NewerFormatError
from kdist_trainer.formats.step_lines import StepLines
from kdist_trainer.training.step_log import StepLine
from kdist_trainer.training.sync import StepRecord

Line = dict[str, Any]


def written(steps: Iterable[int], generation: int = 1, *, seconds: float = 0.25) -> list[Line]:
    return [
        StepLine(
            StepRecord(step, step * 8, step * 8 + 7, seconds),
            1.0 / (step + 1),
            generation=generation,
            world_size=2,
            wait_seconds=seconds / 2,
        ).to_json()
        for step in steps
    ]


def encoded(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def records(
    data: bytes, *, events: Iterable[Line] = (), most: int = 100, piece: int = 1 << 16
) -> list[Line]:
    reader = StepLines(events, nbytes=len(data), most=most)
    for at in range(0, len(data), piece):
        reader.add(data[at : at + piece])
    return reader.records()


def steps_of(found: Iterable[Line]) -> Iterator[int]:
    for one in found:
        yield from range(one["step"] - one.get("steps", 1) + 1, one["step"] + 1)


def began(generation: int, from_step: int) -> Line:
    return {"event": "generation", "generation": generation, "from_step": from_step}


def test_a_short_ledger_comes_as_it_is() -> None:
    lines = written(range(1, 3000))
    assert records(encoded(lines), most=10_000) == lines


@pytest.mark.parametrize("name", ["step", "generation", "world_size", "first", "last"])
def test_a_line_with_a_number_that_cannot_be_read_is_left_out(name: str) -> None:
    lines = [encoded([line]) for line in written(range(1, 5))]
    lines[1] = lines[1].replace(b'"%s":' % name.encode(), b'"%s":%s' % (name.encode(), b"9" * 5000))
    assert list(steps_of(records(b"".join(lines)))) == [1, 3, 4]


@pytest.mark.parametrize("spaced", [False, True], ids=["as written", "other spaces"])
@pytest.mark.sampled
def test_a_long_one_is_few_records_with_the_same_sums_and_no_step_twice(spaced: bool) -> None:
    lines = written(range(1, 30_001))
    data = encoded(lines)
    found = records(data.replace(b'"step":', b'"step": ') if spaced else data)
    assert 50 <= len(found) <= 100 + 5000
    assert list(steps_of(found)) == list(range(1, 30_001))
    for name in ("seconds", "wait_seconds"):
        assert sum(one[name] for one in found) == pytest.approx(sum(one[name] for one in lines))
    assert found[0] == lines[0], "the first step of a generation is a record of its own"
    assert found[-2000:] == lines[-2000:], "and so are the newest"
    merged = found[3]
    last = merged["step"]
    assert {**lines[last - 1], "first": merged["first"], "steps": merged["steps"]} == {
        **merged,
        **{name: lines[last - 1][name] for name in ("seconds", "wait_seconds")},
    }, "a record is the line of its last step"
    assert merged["first"] == lines[last - merged["steps"]]["first"], "from its first sample on"


def test_no_record_crosses_a_step_that_a_generation_began_from_or_that_was_committed() -> None:
    lines = written(range(1, 20_001)) + written(range(15_001, 50_001), 2)
    events = [began(1, 0), began(2, 15_000), {"event": "commit", "step": 31_234}]
    found = records(encoded(lines), events=events)
    assert {15_000, 31_234} <= {one["step"] for one in found}
    assert sum(one.get("steps", 1) for one in found) == len(lines)
    first = next(one for one in found if one["generation"] == 2)
    assert (first["step"], "steps" in first) == (15_001, False)


def test_blank_lines_are_no_steps() -> None:
    assert records(b"\n" * 200_000) == []


@pytest.mark.parametrize("loss", [b"NaN", b"1.5", rb'"\ud800"', b"[[1]]"])
def test_a_loss_in_another_form_costs_no_step(loss: bytes) -> None:
    lines = [encoded([line]) for line in written(range(1, 400))]
    lines[200] = lines[200].partition(b'"loss"')[0] + b'"loss":%s}\n' % loss
    assert list(steps_of(records(b"".join(lines)))) == list(range(1, 400))


def test_a_gap_stays_one() -> None:
    lines = written([*range(1, 12_000), *range(12_005, 30_000), 10**15])
    found = records(encoded(lines))
    assert list(steps_of(found)) == [line["step"] for line in lines]


TORN = [
    b'{"step":7,"gene',
    b"\xff\xfe\n",
    b"[1]\n",
    b"{}\n",
    b"\n",
    b'{"step":true,"generation":1}\n',
]


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(TORN)), max_size=6),
    st.sampled_from([1000, 4096, 1 << 20]),
)
def test_rubbish_between_lines_costs_no_line_but_the_one_that_it_is_in(
    rubbish: list[tuple[int, bytes]], piece: int
) -> None:
    lines = [encoded([line]) for line in written(range(1, 401))]
    torn = {at for at, text in rubbish if not text.endswith(b"\n") and at < len(lines)}
    for at, text in sorted(rubbish, reverse=True, key=lambda one: one[0]):
        lines.insert(at, text)
    found = set(steps_of(records(b"".join(lines), piece=piece)))
    assert found >= set(range(1, 401)) - {at + 1 for at in torn}


def test_the_last_line_of_a_file_may_lack_its_end_and_the_next_file_begins_a_new_one() -> None:
    one, two = (encoded(written([step])) for step in (1, 2))
    reader = StepLines([])
    reader.add(one.rstrip(b"\n"))
    reader.end_file()
    reader.add(memoryview(two[:20]))
    reader.add(memoryview(two[20:-1]))
    assert [line["step"] for line in reader.records()] == [1, 2]


@pytest.mark.sampled
def test_a_line_without_end_and_steps_without_order_take_bounded_memory() -> None:
    endless = StepLines([], most=50)
    tracemalloc.start()
    try:
        for _ in range(200):
            endless.add(b"x" * (1 << 18))
        endless.add(b"\n" + encoded(written([9])))
        for begin in range(0, 40_000, 2_000):  # each step apart from the one before
            endless.add(encoded(written(range(2 * begin, 2 * begin + 4_000, 2))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    found = endless.records()
    assert found[-1]["step"] == 79_998
    assert len(found) < 6000


def test_a_line_of_a_newer_version_is_refused() -> None:
    with pytest.raises(NewerFormatError):
        records(encoded([{"format": 99, **written([1])[0]}]))
