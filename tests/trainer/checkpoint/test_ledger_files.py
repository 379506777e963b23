"""Files of lines: their end is read without the rest, and what has grown without what was there."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.ledger import (
    GrowingLines,
    StepLedger,
    parse_lines,
    read_lines,
    read_newest,
)
from kdist_trainer.formats import LEDGER, STEPS_FILE


def write(path: Path, first: int, last: int, *, text: str = "") -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"n": n, "text": text}) + "\n" for n in range(first, last))


@pytest.mark.parametrize("text", ["", "x" * 1000, "x" * 50_000])
def test_the_pieces_of_the_end_are_the_lines_of_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines"
    write(path, 0, 50, text=text)
    write(path, 50, 1500)
    path.open("a").write('{"n": 1500, "te')
    pieces = list(read_newest(path))
    assert len(pieces) > 1
    assert [one["n"] for one in chain(*reversed(pieces))] == list(range(1500))


def test_which_steps_are_written_is_found_without_reading_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = StepLedger(tmp_path)
    for generation in (1, 2):
        lines = ({"generation": generation, "step": n, "pad": "x" * 100} for n in range(5000))
        ledger.append(lines)
    ledger.close()
    parsed = count_parsed(monkeypatch)
    wanted = {(2, 4997), (2, 4999), (2, 5000)}
    assert StepLedger.find_written(tmp_path, wanted) == {(2, 4997), (2, 4999)}
    assert 0 < len(parsed) < 1000 < len(read_lines(tmp_path / LEDGER / STEPS_FILE))
    assert StepLedger.find_written(tmp_path, {(1, 17)}) == {(1, 17)}
    parsed.clear()
    assert StepLedger.find_written(tmp_path, set()) == set()
    assert not parsed


def test_of_a_generation_without_steps_the_lines_of_those_before_are_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = StepLedger(tmp_path)
    ledger.append({"generation": 3, "step": n, "pad": "x" * 100} for n in range(1, 10_001))
    ledger.close()
    parsed = count_parsed(monkeypatch)
    assert StepLedger.find_last_step(tmp_path, 4) == 0
    assert 0 < len(parsed) < 1000
    assert StepLedger.find_last_step(tmp_path, 3) == 10_000
    assert StepLedger.find_last_step(tmp_path, 2) == 0


def test_of_a_file_that_grows_only_what_is_new_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    lines = GrowingLines(path)
    assert lines.read() == []
    parsed = count_parsed(monkeypatch)
    for end in (1, 500, 501):
        write(path, end - 1 if end != 500 else 1, end)
        parsed.clear()
        assert [one["n"] for one in lines.read()] == list(range(end))
        assert len(parsed) == (499 if end == 500 else 1)


@pytest.mark.parametrize("torn", ['{"n": 3', '{"n": 3}', "\n\n", "rubbish"])
def test_a_line_that_is_not_finished_yet_is_read_again(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines"
    lines = GrowingLines(path)
    write(path, 0, 3)
    path.open("a").write(torn)
    assert lines.read() == read_lines(path)
    path.open("a").write("}\n" if torn == '{"n": 3' else "\n")
    write(path, 4, 6)
    assert lines.read() == read_lines(path)


@pytest.mark.parametrize("count", [2, 10, 40])
def test_a_file_that_took_the_place_of_another_is_read_from_its_beginning(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "lines"
    lines = GrowingLines(path)
    write(path, 0, 10)
    assert len(lines.read()) == 10
    write(tmp_path / "other", 100, 100 + count)
    (tmp_path / "other").replace(path)
    assert [one["n"] for one in lines.read()] == list(range(100, 100 + count))
    path.unlink()
    assert lines.read() == []


def count_parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines that are parsed from now on."""
    parsed: list[bytes] = []
    parse = parse_lines

    def note(data: bytes) -> list[dict[str, Any]]:
        parsed.extend(data.splitlines())
        return parse(data)

    monkeypatch.setattr("kdist_trainer.checkpoint.ledger.parse_lines", note)
    return parsed
