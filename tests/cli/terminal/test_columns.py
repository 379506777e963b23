"""Tables whose rows come one after another, in terminals of any width."""

from __future__ import annotations

import pytest

from kdist.terminal.columns import Table

HEADER = ("NAME", "PHASE", "STEP", "LOSS", "RESTARTS", "AGE")


def test_later_rows_stand_below_the_earlier_ones() -> None:
    table = Table(HEADER)
    first = table.add([("digits", "Pending", "-", "-", "0", "5s")])
    later = table.add([("digits", "Running", "7/500", "2.31", "0", "9s")])
    assert [line.split()[0] for line in first + later] == ["NAME", "digits", "digits"]
    assert first[0].index("AGE") == first[1].index("5s")
    assert later[0].index("Running") == first[0].index("PHASE")


def test_a_cell_that_needs_more_room_is_shown_whole() -> None:
    table = Table(HEADER)
    table.add([("digits", "Running", "9/12000", "2.31", "0", "5s")], 50)
    (line,) = table.add([("digits", "Running", "10000/12000", "2.31", "0", "9s")], 50)
    assert "10000/12000" in line
    assert len(line) <= 50


def test_the_header_is_repeated_only_where_other_columns_fit() -> None:
    table = Table(HEADER)
    row = ("digits", "Running", "9/12000", "2.31", "0", "5s")
    wide, same, narrow, again = (table.add([row], width) for width in (120, 100, 30, 30))
    assert [len(each) for each in (wide, same, narrow, again)] == [2, 1, 2, 1]
    assert "RESTARTS" in wide[0]
    assert "RESTARTS" not in narrow[0]
    assert max(map(len, narrow)) <= 30


def test_without_its_header_a_table_leaves_out_the_same_columns() -> None:
    row = ("digits-of-a-long-name", "Running", "9/12000", "2.31", "0", "5s")
    _, shown = Table(HEADER).add([row], 40)
    assert [line.split() for line in Table(HEADER, with_header=False).add([row], 40)] == [
        shown.split()
    ]
    assert len(shown) <= 40


@pytest.mark.parametrize("width", [1, 7, 20, None])
def test_no_rows_and_empty_cells_are_no_trouble(width: int | None) -> None:
    assert Table(HEADER).add([], width)
    assert Table(HEADER, with_header=False).add([], width) == []
    assert Table(HEADER, with_header=False).add([("",) * 6], width) == [""]


def test_one_column_always_stays() -> None:
    assert Table(("LOSS", "NODES", "AGE")).add([("2.31", "2/2", "5s")], 1) == ["AGE", "5s"]
