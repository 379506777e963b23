"""The subset of kubectl's JSONPath that scripts use: `{.items[*].name}`, `{.ranks[0]['step']}`,
text between the braces. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kdist.errors import UsageError
from kdist_trainer.json_text import encode_json

_STEP = re.compile(
    r"""\.?(?P<word>[A-Za-z_][\w-]*|\*)|\[(?P<index>-?\d+)\]|\[\*\]|\[(?P<quote>['"])(?P<key>(?:(?!(?P=quote)).)*)(?P=quote)\]"""
)
# Unsupported features of kubectl's JSONPath, by a pattern that detects them outside of quotes.
_UNSUPPORTED = {
    r"\{\s*(range|end)\b": "range and end",
    r"\[\?": "filters ([?(…)])",
    r"\.\.": "recursive descent (..)",
    r"\[[^\]]*,": "unions ([a,b])",
    r"\[[^\]'\"]*:": "slices ([a:b])",
}
_ESCAPES = {"\\n": "\n", "\\t": "\t"}


def find(template: str, document: Any) -> str:
    """Replace each `{…}` in the template by the values that it selects, separated by spaces, as
    kubectl does. A path that does not exist selects nothing.

    Raises:
        UsageError: the template is invalid or not supported.
    """
    pieces = re.split(r"\{(.*?)\}", template)
    if "{" in "".join(pieces[::2]) or "}" in "".join(pieces[::2]):
        raise _invalid(template)
    if len(pieces) == 1:  # kubectl accepts a bare path too
        pieces = ["", template, ""]
    found = []
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            found.append(_unescape(piece))
        elif piece[:1] in "'\"" and len(piece) >= 2 and piece[-1] == piece[0]:
            found.append(_unescape(piece[1:-1]))
        else:
            found.append(" ".join(_show(value) for value in _pick(piece, document, template)))
    return "".join(found)


def _pick(path: str, document: Any, template: str) -> list[Any]:
    values = [document]
    rest = path.strip().removeprefix("$")
    if rest == ".":
        return values
    while rest:
        step = _STEP.match(rest)
        if step is None or (rest[0] not in ".[" and len(rest) == len(path)):
            raise _invalid(template)
        rest = rest[step.end() :]
        if step["index"] is not None:
            at = int(step["index"])
            values = [
                value[at]
                for value in values
                if isinstance(value, list) and -len(value) <= at < len(value)
            ]
        elif step["word"] == "*" or step[0] == "[*]":
            values = [item for value in values for item in _items(value)]
        else:
            key = step["word"] or step["key"]
            values = [value[key] for value in values if isinstance(value, dict) and key in value]
    return values


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _show(value: Any) -> str:
    return value if isinstance(value, str) else encode_json(value, ensure_ascii=False)


def _unescape(text: str) -> str:
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    return text


def _invalid(template: str) -> UsageError:
    supported = (
        "it supports {.items[*].name}, {.ranks[0]}, {['odd.key']} and text between the braces"
    )
    for pattern, name in _UNSUPPORTED.items():
        if re.search(pattern, template):
            return UsageError(
                f"-o jsonpath does not understand {name}, as in `{template}`",
                hint=f"{supported}; -o json | jq does more",
            )
    return UsageError(f"-o jsonpath cannot read `{template}`", hint=supported)
