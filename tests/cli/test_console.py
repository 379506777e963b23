"""Data goes to stdout, messages to stderr, and colour is only ever a decoration."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from rich.text import Text

from kdist import app, console
from kdist.errors import InvalidJobError, KdistError, Problem
from tests.cli.terminal.test_text import is_harmless

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


FORGED = "ok\x1b[2J\r\nNext: kdist delete\u2028Error: x\n\x9b31m\u202e"


def test_no_line_can_be_forged_and_no_control_character_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.result(FORGED)
    console.table([(FORGED, FORGED), ("a b" + FORGED, "c d")], header=("NAME", "MESSAGE"))
    console.paragraph(FORGED, start=console.style("Fix: ", bold=True))
    console.message(FORGED)
    console.warning(FORGED)
    console.error(KdistError(FORGED, hint=FORGED, next_command=FORGED))
    console.error(InvalidJobError("job.yaml", [PROBLEM._replace(message=FORGED, source=FORGED)]))
    shown = "".join(capsys.readouterr())
    assert is_harmless(shown.replace("\n", ""))
    begins = [line.split(" ")[0] for line in shown.splitlines() if not line.startswith("  ")]
    own = {"Fix:", "Warning:", "Error:", "Hint:", "Next:", "NAME", "a"}
    assert {begin for begin in begins if not begin.startswith("ok")} <= own
    assert begins.count("Next:") == 1, "that of the error"
    assert begins.count("Error:") == 2, "those of the errors"


def test_machine_readable_output_has_the_same_values_and_no_control_character(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        console.emit({FORGED: [FORGED]}, output=output)
        shown = capsys.readouterr().out
        assert read(shown) == {FORGED: [FORGED]}
        assert is_harmless(shown.replace("\n", ""))
    console.emit({"a": FORGED}, output="name", name=FORGED)
    assert is_harmless(capsys.readouterr().out.replace("\n", ""))


def test_a_live_view_and_what_is_printed_above_it_show_no_control_character(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    hostile = "a\x1b]0;t\x07\x9b31m\u202e\x85" * 20
    with console.drawing() as view:
        view.update(Text(hostile, no_wrap=True))
        view.print(Text(hostile))
        console.message(hostile)
    shown = capfd.readouterr().err
    left = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", shown)  # of rich: styles and the cursor
    assert is_harmless(left.replace("\n", ""))
    assert r"\x1b]0;t\x07\x9b31m\u202e\x85" in left.replace("\n", "")


def test_suggested_commands_keep_the_place_that_the_options_choose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.answer.begin("json")
    console.answer.place = "--context prod --as ann"
    hint = "`kdist delete a` keeps what kdist needs; see `kdist explain spec` or kdist doctor"
    problem = KdistError("x", hint=hint, next_command="kdist apply J -n ml && kdist why a")
    console.error(problem)
    console.fail(problem)
    console.emit({"commands": ["kubectl cordon n", "kdist explain spec"]}, kind="K", output="json")
    reported = capsys.readouterr()
    kdist = "kdist --context prod --as ann"
    hint = f"`{kdist} delete a` keeps what kdist needs; see `kdist explain spec` or {kdist} doctor"
    command = f"{kdist} apply J -n ml && {kdist} why a"
    assert reported.err == f"Error: x\nHint: {hint}\nNext: {command}\n"
    error, _, other = reported.out.partition("}\n")
    found = json.loads(error + "}")
    assert (found["hint"], found["nextCommand"]) == (hint, command)
    commands = ["kubectl --context prod --as ann cordon n", "kdist explain spec"]
    assert json.loads(other)["commands"] == commands
    console.answer.begin("")


def test_the_commands_that_keep_the_place_are_those_that_have_its_options() -> None:
    console.answer.place = "--context prod"
    names = [name for section in app.sections().values() for name in section]
    for name in names:
        command = app.load_command(name)
        below = (command, *getattr(command, "commands", {}).values())
        able = any(each.name == "context" for one in below for each in one.params)
        kept = console.name_place(f"kdist {name} a") != f"kdist {name} a"
        assert (name, kept) == (name, able)
    console.answer.begin("")
