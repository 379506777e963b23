"""Text for a terminal: nothing that it obeys reaches it, but kdist's own styles."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.terminal import keep_colors, style, to_terminal, unstyle, visible, visible_json

STYLE = re.compile(r"\x1b\[[0-9;]*m")
# escape sequences of terminals, marks of direction, line separators and halves of surrogates
HOSTILE = (
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x07", "\x1b[6n", "\x1bP+q\x1b\\",
    "\x9b31m", "\x9d0;t\x9c", "\r", "\r\n", "\x08\x08", "\x7f", "\x85", "\u2028", "\u2029",
    "\u202e", "\u202a", "\u2066", "\u2069", "\u200b", "\u200f", "\ufeff", "\x00", "\ud800",
    "\U000e0041", "\x1b[31m", "\x1b[8m", "\x0b", "\x0c", "\x1c",
)  # fmt: skip
texts = st.lists(st.sampled_from(HOSTILE) | st.text()).map("".join)


def is_harmless(text: str) -> bool:
    return all(unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in text)


@given(texts)
def test_no_character_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert is_harmless(shown)
    assert shown.encode().decode() == shown
    assert visible(shown) == shown
    assert is_harmless(visible(text, keep="\n\t").translate({10: None, 9: None}))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("ok\r\nNext: x", r"ok\r\nNext: x"),
        ("a\u202eb", r"a\u202eb"),
        ("a\u2028b", r"a\u2028b"),
        ("a\x9b31m", r"a\x9b31m"),
        ("\ud800", r"\ud800"),
        ("Grüße, 世界　😀 1 000", "Grüße, 世界　😀 1 000"),
    ],
)
def test_what_a_terminal_obeys_is_written_out_and_all_else_stays(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(texts, st.booleans())
def test_only_styles_of_kdist_become_escape_sequences(text: str, color: bool) -> None:
    marked = f"{style('Error:', 'red', bold=True)} {text}{style(text, dim=True)}"
    shown = to_terminal(marked, color=color)
    assert STYLE.findall(shown) == (
        ["\x1b[31;1m", "\x1b[0m", "\x1b[2m", "\x1b[0m"] if color else []
    )
    assert STYLE.sub("", shown) == f"Error: {visible(text)}{visible(text)}"
    assert unstyle(marked) == f"Error: {text}{text}"


@given(texts, st.booleans())
def test_of_what_a_training_prints_colours_stay_at_most(text: str, color: bool) -> None:
    shown = to_terminal(keep_colors(text), color=color)
    assert is_harmless(STYLE.sub("", shown))
    if not color:
        assert is_harmless(shown)
    if STYLE.search(shown):
        assert shown.endswith("\x1b[0m")


def test_a_colour_that_a_training_has_printed_is_shown_and_ends_with_its_line() -> None:
    printed = keep_colors("\x1b[31mred\x1b[K\x1b[m")
    assert to_terminal(printed, color=True) == "\x1b[31mred\\x1b[K\x1b[0m\x1b[0m"
    assert to_terminal(printed, color=False) == r"red\x1b[K"


@pytest.mark.sampled
@given(st.recursive(texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_json_keeps_its_meaning_without_such_characters(value: object) -> None:
    written = visible_json(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(written) == json.loads(json.dumps(value))
    assert is_harmless(written.replace("\n", ""))
