"""YAML that others wrote is read within bounds; YAML that is written can be shown and read."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kdist.terminal import visible
from kdist.yaml_text import MAX_BYTES, parse_yaml, to_yaml
from kdist_trainer.formats.untrusted_text import MalformedTextError
from tests.cli.terminal.test_text import texts

PIECES = (
    "[", "]", "{", "}", "a", ": ", "- ", "\n", "  ", "&a ", "*a", "<<", "'", '"', "!x ", "|", "? ",
    "\x00", "1e", "2026-02-30",
)  # fmt: skip
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "deeper than 100"),
        ("- " * 5_000, "deeper than 100"),
        ("{a: " * 101, "deeper than 100"),
        (BOMB, "values, including aliases"),
        (MERGES, "values, including aliases"),
        ("&a [*a]", "values, including aliases"),
        ("a: [1", "at line 2, column 1"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("2026-02-30", "is not YAML"),
        ("{[1]: 2}", "unhashable"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("x" * (MAX_BYTES + 1), "is larger than"),
    ],
    ids=lambda part: str(part)[:12],
)
def test_a_malformed_text_says_what_is_wrong(text: str | bytes, reason: str) -> None:
    with pytest.raises(MalformedTextError, match=reason):
        parse_yaml(text)


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text() | st.binary())
def test_any_text_is_read_or_is_malformed(text: str | bytes) -> None:
    try:
        found = parse_yaml(text)
    except MalformedTextError:
        return
    assert isinstance(found, list)


def test_documents_and_aliases_are_read() -> None:
    assert parse_yaml("a: &x [1]\nb: *x\n---\n{<<: {c: 2}, d: 3}\n") == [
        {"a": [1], "b": [1]},
        {"c": 2, "d": 3},
    ]


# YAML has no halves of surrogates
values = st.recursive(
    texts.map(lambda text: text.encode("utf-8", "replace").decode()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab\u202e\x85"), inner),
    max_leaves=8,
)


@given(values)
def test_what_is_written_is_read_as_it_was_and_shows_no_control_character(value: Any) -> None:
    written = to_yaml(value)
    assert yaml.safe_load(written) == value
    assert visible(written, keep="\n\t") == written
