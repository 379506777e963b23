"""Manifests as YAML: what any of YAML 1.1, YAML 1.2 or Go's parser would read as something else
than text is quoted.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kdist.manifest import Manifest, to_json
from kdist.render import text

WORDS = ["y", "n", "Y", "N", "yes", "On", "off", "NO", "true", "TRUE", "~", "null", "Null", "NULL"]
WORDS += ["<<", "=", ""]
NUMBERS = ["1e5", "1E5", "1e-3", "12e03", "0o17", "0O17", "0x1F", "017", "08", "1_000", "+_67"]
NUMBERS += ["0b11", "-0b1", "1:30", "190:20:30", ".inf", "-.INF", "+.Inf", ".nan", ".NaN", "1."]
NUMBERS += ["+1", ".5", "-.5e3", "685_230.15", "2001-01-01", "1e234567", "0x_1"]
NUMBERS += ["2001-12-14t21:59:43.10-05:00", "2001-12-14 21:59:43.10 -5"]
BREAKS = ["a\x85b", "a\u2028b", "a\u2029b", "\ufeffx", "x\ry", "x\r\ny", "x\n\x85y"]
BREAKS += ["\ttab first\nsecond", " space\nx", "\n\tx"]
OTHERS = ["x\n\n\n", "x\n  ", "a\n \n b", "1e5\n", "a: b", "- a", "#x", "a #b", "@x", "%x", "!x"]
OTHERS += ["&a", "*a", "|", ">", "---", "a\n---\nb", "a\n...\nb", "tab\there", "\x07\x1b[31m"]
OTHERS += ["x" * 200, "\u00a0", "😀 ünï 漢字", "128Mi", "200m"]
SCALARS = [*WORDS, *NUMBERS, *BREAKS, *OTHERS]
"""Texts that YAML's parsers disagree about; tests/cluster/test_objects.py sends them through
kubectl.
"""


def write(data: dict[str, str]) -> str:
    return text.to_yaml([config_map(data)]) + "\n"


def find_styles(data: dict[str, str]) -> list[str | None]:
    """How the keys and values are quoted."""
    document: Any = yaml.compose(write(data))
    return [node.style for pair in document.value[-1][1].value for node in pair]


def config_map(data: dict[str, str]) -> Manifest:
    return Manifest(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scalars"}, "data": data}
    )


@pytest.mark.parametrize("scalar", [*WORDS, *NUMBERS])
def test_a_text_that_a_parser_takes_for_a_number_or_a_word_is_quoted_as_value_and_as_key(
    scalar: str,
) -> None:
    assert find_styles({scalar: scalar}) == ["'", "'"]


@pytest.mark.parametrize("scalar", BREAKS)
def test_a_line_break_that_a_parser_may_fold_or_refuse_is_escaped(scalar: str) -> None:
    assert find_styles({"key": scalar}) == [None, '"']


PLAIN = ["digits", "128Mi", "registry/kdist:1.0", "full-code-1a2b", "/checkpoints", "65s", "nobody"]


@pytest.mark.parametrize("plain", [*PLAIN, "İ"])
def test_what_every_parser_reads_as_text_stays_bare(plain: str) -> None:
    assert f"key: {plain}\n" in write({"key": plain})


# The last one is no text that kubectl can send: its JSON leaves these bare, which the server's
# parser refuses.
@pytest.mark.parametrize("scalar", [*SCALARS, "\x7f\x80"])
def test_a_hostile_scalar_is_read_back_as_it_was(scalar: str) -> None:
    expected = {"key": scalar, f"key {scalar}": "x"}
    assert yaml.safe_load(write({"key": scalar, f"key {scalar}": "x"}))["data"] == expected


@pytest.mark.parametrize("scalar", [*SCALARS, "\x7f\x80"])
def test_what_is_sent_as_json_is_read_as_yaml_too(scalar: str) -> None:
    sent = to_json({scalar: scalar})
    assert yaml.safe_load(sent) == {scalar: scalar} == json.loads(sent)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_read_back_as_it_was(scalar: str) -> None:
    assert yaml.safe_load(write({"key": scalar}))["data"] == {"key": scalar}
