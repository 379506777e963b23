"""Events as lines: whole, parseable and harmless whatever they are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer import log

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(st.dictionaries(st.text(min_size=1), values), st.text())
def test_every_line_is_one_json_object_of_at_most_4_kib(
    fields: dict[str, object], message: str
) -> None:
    line = log.render("info", "thing-happened", {**fields, "message": message * 50}, now=NOW)
    assert len(line) <= log.MAX_LINE
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert isinstance(json.loads(line), dict)


def test_a_line_says_when_what_and_how_bad_before_all_else() -> None:
    line = log.render("warning", "disk-full", {"free": 3, "step": 7}, now=NOW)
    assert line.startswith(
        b'{"time":"2026-01-02T03:04:05.678Z","event":"disk-full","level":"warning",'
    )
    assert list(json.loads(line))[-2:] == ["step", "free"]


@pytest.mark.parametrize(
    ("number", "word"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")]
)
def test_numbers_that_json_lacks_are_words(number: float, word: str) -> None:
    assert json.loads(
        log.render("info", "progress", {"loss": number, "losses": [number]}, now=NOW)
    )["losses"] == [word]


def test_what_json_cannot_hold_becomes_text() -> None:
    class Colour(Enum):
        RED = 1

    line = json.loads(
        log.render(
            "info",
            "odd",
            {"path": Path("/a/b"), "colour": Colour.RED, "raw": b"\xff", "lost": "\udc80"},
            now=NOW,
        )
    )
    assert line["path"] == "/a/b"
    assert line["colour"] == "Colour.RED"
    assert line["raw"] == "b'\\xff'"
    assert line["lost"] == "\udc80"


def test_a_long_message_is_cut_and_what_matters_stays() -> None:
    fields = {"step": 3, "message": "x" * 10_000, "extra": {str(i): "y" * 500 for i in range(50)}}
    line = json.loads(log.render("error", "worker-failed", fields, now=NOW))
    assert line["event"] == "worker-failed"
    assert line["step"] == 3
    assert line["message"].startswith("xxx")


def test_a_field_that_is_none_is_left_out() -> None:
    assert "loss" not in json.loads(log.render("info", "progress", {"loss": None}, now=NOW))


def run_python(code: str, **environment: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_rank_says_who_it_is_by_its_environment_and_by_what_it_binds() -> None:
    code = (
        "from kdist_trainer import log; log.event('a'); log.bind(generation=4, node=None, "
        "rank=2); log.warn('b', rank=9)"
    )
    first, second = run_python(
        code, KDIST_JOB="007", KDIST_NODE="node-0", RANK="1", KDIST_GENERATION="3"
    )
    expected = ["007", "node-0", 1, 3]
    assert [first[name] for name in ("job", "node", "rank", "generation")] == expected
    assert "node" not in second
    assert [second[name] for name in ("job", "rank", "generation", "level")] == [
        "007",
        9,
        4,
        "warning",
    ]


def test_logging_goes_on_when_standard_error_is_closed() -> None:
    code = (
        "import os; from kdist_trainer import log; os.close(2); log.error('a', x=object()); "
        "os.write(1, b'')"
    )
    assert run_python(code) == []


def test_a_value_that_cannot_be_shown_loses_its_line_and_nothing_else() -> None:
    code = """
from kdist_trainer import log
class Evil:
    def __str__(self): raise RuntimeError
log.event("lost", x=Evil())
log.event("kept")
"""
    assert [line["event"] for line in run_python(code)] == ["kept"]


def test_the_package_and_the_torch_free_rooms_load_without_torch() -> None:
    code = """
import sys
import kdist_trainer, kdist_trainer.config, kdist_trainer.log, kdist_trainer.metrics.exporter, \
kdist_trainer.metrics.transport
assert kdist_trainer.Reporter is kdist_trainer.metrics.transport.Reporter
kdist_trainer.log.event("loaded", torch="torch" in sys.modules, numpy="numpy" in sys.modules)
"""
    (line,) = run_python(code)
    assert (line["torch"], line["numpy"]) == (False, False)


def test_a_name_that_the_package_does_not_offer_is_an_attribute_error() -> None:
    import kdist_trainer

    with pytest.raises(AttributeError, match="Trainer"):
        kdist_trainer.Trainer  # noqa: B018
