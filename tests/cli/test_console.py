"""Data goes to stdout, messages to stderr, and colour is only ever a decoration."""

from __future__ import annotations

import json

import pytest
import yaml

from kdist import console
from kdist.errors import InvalidJobError, KdistError, Problem

PROBLEM = Problem(
    "job.yaml", 2, 5, "spec.nodse", "unknown field", "nodes", "a hint", "    nodse: 2", 5
)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_an_error_says_what_where_why_and_last_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.error(InvalidJobError("job.yaml", [PROBLEM], next_command="kdist explain spec"))
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err == (
        "job.yaml:2:5: spec.nodse: unknown field; did you mean `nodes`?\n"
        "     2 |     nodse: 2\n"
        "       |     ^^^^^\n"
        "       hint: a hint\n"
        "Error: `job.yaml` has 1 problem\n"
        "Next: kdist explain spec\n"
    )


def test_colour_can_be_forced_and_forbidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console.error(KdistError("x"))
    assert "\x1b[" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    console.error(KdistError("x"))
    assert capsys.readouterr().err == "Error: x\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    console.error(KdistError("x"))
    assert capsys.readouterr().err == "Error: x\n"


def test_values_are_emitted_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": "ä", "list": [1, None]}
    console.emit(value, output="json")
    assert json.loads(capsys.readouterr().out) == value
    console.emit(value, output="yaml")
    assert yaml.safe_load(capsys.readouterr().out) == value
    console.emit(value, output="name", name="job/ä")
    assert capsys.readouterr().out == "job/ä\n"
    with pytest.raises(ValueError, match="no output format 'xml'"):
        console.emit(value, output="xml")


def test_a_table_is_aligned_without_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    console.table([("a", "1"), ("long", "")], header=("NAME", "N"))
    assert capsys.readouterr().out == "NAME   N\na      1\nlong\n"


def test_messages_and_warnings_stay_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    console.message("hello")
    console.warning("beware")
    reported = capsys.readouterr()
    assert (reported.out, reported.err) == ("", "hello\nWarning: beware\n")
