"""Whatever is in a file, it is a job or a list of problems with places: never a traceback, never a
hang.
"""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdist.errors import InvalidJobError
from kdist.job_file import load_text
from kdist.spec import TrainingJob, reference
from kdist.terminal import visible
from tests.cli.conftest import JOB

FAST = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = sorted({field.name for field in reference.root().walk()})
SIGNS = [
    "  ",
    "\t",
    "- ",
    "? ",
    ": ",
    "&a ",
    "*a",
    "!!str ",
    "<<: ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "'",
    '"',
    "|",
    ">-",
    "#",
]
MORE_SIGNS = ["---", "...", "%YAML 1.1", "\n", "\r\n", "\u2028", "0o7", "012", "\\x"]
PIECES = st.sampled_from(
    [*JOB.splitlines(), *(f"{name}: " for name in NAMES[::7]), *SIGNS, *MORE_SIGNS]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([[], {}, "auto", "5m"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
)


def check_outcome(data: str | bytes, *overrides: str) -> TrainingJob | None:
    """The job, or None where it was refused, which has to tell places and nothing that a terminal
    obeys.
    """
    try:
        return load_text(data, source="job.yaml", overrides=overrides)
    except InvalidJobError as refused:
        problems = refused.problems
    assert problems
    for problem in problems:
        assert (problem.line >= 1 and problem.column >= 1) or problem.source.startswith("--set ")
        assert visible(str(problem)) == str(problem)
        assert problem.excerpt.isprintable()
    return None


@FAST
@given(st.binary(max_size=400))
def test_any_bytes_are_refused_with_places(data: bytes) -> None:
    check_outcome(data)


@FAST
@given(st.text(max_size=400))
def test_any_text_is_refused_with_places(text: str) -> None:
    check_outcome(text)


@FAST
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_pieces_of_yaml_are_a_job_or_problems(text: str) -> None:
    check_outcome(text)


@FAST
@given(st.lists(PIECES, max_size=12).map(" ".join), st.integers(min_value=0, max_value=len(JOB)))
def test_any_damage_to_a_good_file_is_reported_with_places(piece: str, position: int) -> None:
    check_outcome(JOB[:position] + piece + JOB[position:])


@FAST
@given(st.sampled_from([field.path for field in reference.root().walk()]), VALUES)
def test_any_value_in_any_field_is_taken_or_reported(path: str, value: Any) -> None:
    job: dict[str, Any] = yaml.safe_load(JOB)
    place: Any = job
    *sections, last = path.replace("[]", ".[]").split(".")
    for section, following in zip(sections, [*sections, last][1:], strict=True):
        if section == "[]":
            continue
        if following == "[]":
            place[section] = [{}]
            place = place[section][0]
        else:
            place = place.setdefault(section, {})
    place["unknown" if last == "[]" else last] = value
    result = check_outcome(yaml.safe_dump(job, allow_unicode=True))
    if result is not None:
        assert load_text(yaml.safe_dump(result.to_document()), source="again") == result


@FAST
@given(st.text(max_size=60), st.text(max_size=30))
def test_any_override_is_taken_or_reported(path: str, value: str) -> None:
    for option in (
        f"{path}={value}",
        f"spec.{path}={value}",
        f"spec.nodes={value}",
        f"spec.env[0].value={value}",
    ):
        check_outcome(JOB, option)
