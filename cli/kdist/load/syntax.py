"""PyYAML's complaints about syntax in words that say what to do."""

from __future__ import annotations

import re

import yaml

from kdist.errors import Problem
from kdist.load.text import split_lines

_NO_KEY = ("this line is no `key: value`", "put `: ` after the key, or quote text of several lines")

# (what PyYAML says, what we say, the way out); the first that is found in its words counts.
_WORDS = (
    (r"found character '\\t'", "a tab cannot stand here", "YAML is indented with spaces"),
    (r"found character '([%@`])'", "text cannot begin with `{0}`", "put the text in quotes"),
    (
        "mapping values are not allowed here",
        "`:` cannot stand here",
        "indent the line as its neighbours, or quote text with `: `",
    ),
    ("could not find expected ':'", *_NO_KEY),
    ("found unexpected end of stream", "the quotes that open here are never closed", "close them"),
    ("expected ',' or ']'", "the list `[` that opens here is not closed", "put `,` between its items and `]` at its end"),
    ("expected ',' or '}'", "the mapping `{{` that opens here is not closed", "put `,` between its entries and `}}` at its end"),
    ("expected <block end>, but found ':'", "a key is missing before `:`", "put it there, or quote the text"),
    ("expected <block end>", "the indentation fits no line above", "lines of one section begin in the same column"),
    ("found unknown escape character '(.)'", "`\\{0}` is no escape in double quotes", "use single quotes, or write `\\\\`"),
    ("expected escape sequence", "the escape sequence is not complete", "use single quotes"),
    ("found undefined tag handle", "a tag is not allowed", "quote text that begins with `!`"),
    ("sequence entries are not allowed", "`- ` cannot stand here", "put the list on the next lines, below its key"),
    ("block mapping|block keys", "a key cannot stand here", "put it on its own line"),
)
_OPENING = ("quotes that open", "that opens here")


def explain(error: yaml.MarkedYAMLError, text: str, *, source: str) -> Problem:
    """One problem out of PyYAML's error."""
    said = f"{error.problem or ''} {error.context or ''}"
    message, hint = f"not YAML: {(error.problem or error.context or 'cannot be read').strip()}", ""
    for pattern, ours, way_out in _WORDS:
        found = re.search(pattern, said)
        if found:
            message, hint = ours.format(*found.groups()), way_out.format()
            break
    mark = error.problem_mark or error.context_mark
    if any(words in message for words in _OPENING) and error.context_mark is not None:
        mark = error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    lines = split_lines(text)
    above = lines[line - 2] if 1 < line <= len(lines) else ":"
    if message.startswith("`:`") and above.strip() and ":" not in above:  # YAML took the line above for the key's beginning
        message, hint = _NO_KEY
        line, column = line - 1, len(above) - len(above.lstrip()) + 1
    return Problem(source, min(line, len(lines)), column, "", message, hint=hint)
