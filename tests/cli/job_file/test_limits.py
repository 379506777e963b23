"""Hostile YAML costs little: depth and size are bounded, aliases counted each time, tags never
obeyed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

from kdist.errors import InvalidJobError
from kdist.job_file import load_text
from kdist.job_file.yaml_parser import MAX_DEPTH, MAX_NODES
from tests.cli.conftest import JOB

BOMB = "podTemplate:\n" + "".join(
    f"  l{level}: &l{level} [{', '.join([f'*l{level - 1}' if level else 'lol'] * 10)}]\n"
    for level in range(12)
)


def refusal_of(text: str) -> str:
    with pytest.raises(InvalidJobError) as refused:
        load_text(text, source="job.yaml")
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            BOMB,
            f"job.yaml:6:17: the file has more than {MAX_NODES} values, including aliases",
        ),
        (
            "a: " + "[" * 100_000,
            f"job.yaml:1:{3 + MAX_DEPTH}: nested deeper than {MAX_DEPTH} levels",
        ),
        (
            "a: " + "{a: " * 100_000,
            f"job.yaml:1:{4 * MAX_DEPTH}: nested deeper than {MAX_DEPTH} levels",
        ),
        ("- " * 100_000, f"job.yaml:1:{2 * MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"),
        ("a: [" + "1, " * (MAX_NODES + 10), f"the file has more than {MAX_NODES} values"),
        ("a: &x {a: &y {b: *x}}", "job.yaml:1:18: the alias `*x` is inside its own anchor"),
    ],
)
def test_a_bomb_is_refused_where_it_goes_too_far(text: str, expected: str) -> None:
    started = time.process_time()
    assert expected in refusal_of(text)
    assert time.process_time() - started < 20  # it would be hours, or the end of the stack


def test_depth_counts_through_aliases() -> None:
    levels = "".join(
        f"  l{level}: &l{level} {{a: *l{level - 1}}}\n" for level in range(1, MAX_DEPTH)
    )
    assert "by aliases" in refusal_of(f"podTemplate:\n  l0: &l0 1\n{levels}")


def test_a_bomb_does_not_fill_the_memory() -> None:
    program = """
import sys
from kdist.job_file import load_text
load_text(sys.stdin.read(), source='bomb')
"""
    limit = 1 << 30

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=BOMB,
        capture_output=True,
        text=True,
        preexec_fn=bound,
        timeout=60,
        check=False,
    )
    assert "InvalidJobError" in ended.stderr
    assert "MemoryError" not in ended.stderr


def test_aliases_within_the_limits_are_the_value_they_name() -> None:
    text = JOB + "  env:\n    - {name: A, value: &mode offline}\n    - {name: B, value: *mode}\n"
    expected = ["offline", "offline"]
    assert [variable.value for variable in load_text(text, source="job.yaml").spec.env] == expected


def test_a_wrong_value_behind_an_alias_is_reported_where_it_stands() -> None:
    text = JOB + "  env:\n    - {name: A, value: &mode 012}\n    - {name: B, value: *mode}\n"
    assert "job.yaml:10:24: spec.env[0].value: must be text, found the number 012" in refusal_of(
        text
    )


def test_at_most_a_hundred_problems_are_reported() -> None:
    fields = "".join(f"  wrong{number}: 1\n" for number in range(500))
    with pytest.raises(InvalidJobError) as refused:
        load_text(JOB + fields, source="job.yaml")
    assert len(refused.value.problems) == 100
