"""What is no text, or not the text of one job, is refused with its place before any YAML is
read.
"""

from __future__ import annotations

import pytest

from kdist.errors import InvalidJobError, Problem
from kdist.job_file import load_file, load_text
from kdist.job_file.yaml_parser import MAX_BYTES, shown
from tests.cli.conftest import JOB, Kdist


def problem_of(data: str | bytes) -> Problem:
    """The only problem of a file that cannot be read."""
    with pytest.raises(InvalidJobError) as refused:
        load_text(data, source="job.yaml")
    (problem,) = refused.value.problems
    return problem


@pytest.mark.parametrize(
    ("data", "line", "column", "message"),
    [
        (b"", 1, 1, "the file is empty"),
        (b"# a comment\n", 1, 1, "the file is empty"),
        (b"~\n", 1, 1, "the file is empty"),
        (b"kind: Job\n# caf\xe9\n", 2, 6, "byte 0xe9 is not UTF-8"),
        (
            b"kind: Job\nname: a\x00b\n",
            2,
            8,
            "the file contains a NUL character: this is not a text file",
        ),
        (b"\x7fELF\x02\x01\x01", 1, 1, "the file contains the control character U+007F"),
        (b"kind: \x1b[31mJob\n", 1, 7, "the file contains the control character U+001B"),
        (b"PK\x03\x04", 1, 3, "the file contains the control character U+0003"),
        (JOB.encode("utf-16"), 1, 1, "the file is UTF-16, but a job file is UTF-8"),
        (JOB.encode("utf-16-be"), 1, 1, "the file is UTF-16, but a job file is UTF-8"),
        (JOB.encode("utf-32"), 1, 1, "the file is UTF-16, but a job file is UTF-8"),
        ("kind: \ud800", 1, 7, "the file contains the control character U+D800"),
        (b"#" * (MAX_BYTES + 1), 1, 1, "the file is larger than 1 MiB"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(
    data: str | bytes, line: int, column: int, message: str
) -> None:
    problem = problem_of(data)
    assert (problem.line, problem.column, problem.message) == (line, column, message)


def test_a_byte_order_mark_of_utf_8_does_no_harm(job: str) -> None:
    assert load_text(b"\xef\xbb\xbf" + job.encode(), source="job.yaml").metadata.name == "digits"


def test_json_is_read_with_its_surrogate_pairs(job: str) -> None:
    text = '{"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, '
    text += '"spec": {"script": {"path": "\\ud83d\\ude00.py"}}}'
    script = load_text(text, source="job.json").spec.script
    assert script is not None
    assert script.path == "😀.py"


@pytest.mark.parametrize("line_end", ["\r\n", "\r", "\n"])
def test_lines_are_counted_whatever_ends_them(line_end: str) -> None:
    with pytest.raises(InvalidJobError) as refused:
        load_text((JOB + "  nodse: 2\n").replace("\n", line_end), source="job.yaml")
    (problem,) = refused.value.problems
    assert problem.line == 9
    assert problem.column == 3
    assert problem.suggestion == "nodes"
    assert problem.excerpt == "  nodse: 2"


def test_a_file_of_a_mebibyte_is_read(job: str) -> None:
    padding = "#" * (MAX_BYTES - len(job))
    assert load_text(job + padding, source="job.yaml").metadata.name == "digits"


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(InvalidJobError, match="larger than 1 MiB"):
        load_file("/dev/zero")


def test_stdin_is_read_as_a_file(kdist: Kdist, job: str) -> None:
    assert kdist("validate", "-", stdin=job).exit_code == 0
    refused = kdist("validate", "-", stdin=b"\xff\xfe\x00")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("stdin:1:1: the file is UTF-16")


def test_values_are_shown_without_what_a_terminal_would_obey() -> None:
    assert shown("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"
    assert shown("x" * 100) == "x" * 60 + "…"
