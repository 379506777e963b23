"""Parses YAML text into a tree of nodes with positions, within limits on size and depth, and
converts PyYAML's syntax errors to problems with a hint.

The tree is built from PyYAML's events rather than by its composer: depth and size are checked
before any recursion, keys keep their original text, and several mistakes are found in one pass.

Plain scalars are resolved as in YAML 1.2's core schema, with hints for text that YAML 1.1 reads as
numbers. A job file is decoded as at most 1 MiB of UTF-8 without control characters; lines are
counted as YAML counts them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml

from kdist.errors import Problem
from kdist.terminal import visible
from kdist.yaml_text import parse_events

_INT = re.compile(r"[-+]?[0-9]+\Z")
_OCTAL = re.compile(r"0o[0-7]+\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NO_FINITE = re.compile(r"([-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN)\Z")
_SEXAGESIMAL = re.compile(r"[0-9]+(:[0-5]?[0-9])+\Z")
_UNDERSCORED = re.compile(r"[-+]?[0-9]+(_[0-9]+)+\Z")
_DURATION = re.compile(r"([0-9]+) ?(s|sec|secs|seconds?|m|min|mins|minutes?|h|hours?|d|days?)\Z")
_DURATION_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_DIGITS: Final = 64

Scalar = None | bool | int | float | str


def resolve(text: str) -> Scalar:
    """Value of a plain (unquoted) scalar. Raises `ValueError` with a message for numbers that no
    field can have.
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if not (text[0].isascii() and (text[0].isdigit() or text[0] in "+-.")):
        return text
    if _NO_FINITE.match(text):
        raise ValueError(f"{text} is not a finite number")
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.match(text):
            if len(text) > _MAX_DIGITS:
                raise ValueError(f"the number has more than {_MAX_DIGITS} digits")
            return int(text, base)
    if _FLOAT.match(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"the number {text[:40]} is too large")
        return number
    return text


def number_hint(text: str, *, plain: bool) -> str:
    """How to write the number that a text was probably meant as; empty if there is none."""
    if len(text) > _MAX_DIGITS:
        return ""
    if _SEXAGESIMAL.match(text):
        total = 0
        for part in text.split(":"):
            total = total * 60 + int(part)
        return (
            f"`{text}` is text in YAML 1.2; YAML 1.1 reads it as {total} in base 60: write {total}"
        )
    if _UNDERSCORED.match(text):
        return f"`{text}` is text in YAML 1.2; write {text.replace('_', '')}"
    if (seconds := _seconds(text)) is not None:
        return f"the field counts seconds; write {seconds}"
    if not plain:
        try:
            number = resolve(text)
        except ValueError:
            return ""
        if isinstance(number, int | float) and not isinstance(number, bool):
            return f"quotes make it text; write {text} without them"
    return ""


def interval_hint(text: str) -> str:
    """How to write an interval, in seconds if the text is a duration such as `5m`."""
    seconds = _seconds(text)
    return f"write {{seconds: {seconds}}}" if seconds else "write {seconds: 300} or {steps: 100}"


def _seconds(text: str) -> int | None:
    """The seconds of a duration; None if the text is none."""
    found = _DURATION.match(text)
    if not found or len(found[1]) >= _MAX_DIGITS:
        return None
    return int(found[1]) * _DURATION_SECONDS[found[2][0]]


MAX_BYTES: Final = 1024 * 1024
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def decode(data: str | bytes, *, source: str) -> tuple[str, list[Problem]]:
    """Decode a job file. Returns the text, or an empty text and the problem."""

    def refuse(
        message: str, *, line: int = 1, column: int = 1, hint: str = ""
    ) -> tuple[str, list[Problem]]:
        return "", [Problem(source, line, column, "", message, hint=hint)]

    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > MAX_BYTES:
        return refuse(
            "the file is larger than 1 MiB",
            hint="a job file describes a job; put data and code elsewhere",
        )
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or (
        len(raw) >= 2 and 0 in raw[:2] and raw[:2] != b"\x00\x00"
    ):
        return refuse("the file is UTF-16, but a job file is UTF-8", hint="save it as UTF-8")
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode(
            "utf-8", "surrogatepass" if isinstance(data, str) else "strict"
        )
    except UnicodeDecodeError as error:
        line, column = _position(raw[: error.start].decode("utf-8", "replace"))
        return refuse(
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            line=line,
            column=column,
            hint="save the file as UTF-8",
        )
    found = re.search("\0", text) or _FORBIDDEN.search(text)
    if found:
        line, column = _position(text[: found.start()])
        code = ord(found[0])
        what = (
            "a NUL character: this is not a text file"
            if code == 0
            else f"the control character U+{code:04X}"
        )
        return refuse(
            f"the file contains {what}",
            line=line,
            column=column,
            hint="delete it" if code else "is it the right file? `kdist init` writes a job.yaml",
        )
    return text, []


def split_lines(text: str) -> list[str]:
    """Split text into lines as YAML does."""
    return _LINE_BREAK.split(text)


def _position(before: str) -> tuple[int, int]:
    """Line and column that follow this text."""
    lines = split_lines(before.removeprefix("\ufeff"))
    return len(lines), len(lines[-1]) + 1


def shown(value: object, limit: int = 60) -> str:
    """A value as one short line without control characters, which is safe for a terminal."""
    text = visible(str(value)[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "…"


_NO_KEY = (
    "this line is not a `key: value`",
    "put `: ` after the key, or quote text of several lines",
)

# (pattern in PyYAML's message, our message, hint); the first match counts.
_MESSAGES = (
    (r"found character '\\t'", "a tab is not allowed here", "indent YAML with spaces"),
    (r"found character '([%@`])'", "text cannot begin with `{0}`", "put the text in quotes"),
    (
        "mapping values are not allowed here",
        "`:` is not allowed here",
        "indent the line like its neighbors, or quote text with `: `",
    ),
    ("could not find expected ':'", *_NO_KEY),
    ("found unexpected end of stream", "the quotes that open here are never closed", "close them"),
    (
        "expected ',' or ']'",
        "the list `[` that opens here is not closed",
        "put `,` between its items and `]` at its end",
    ),
    (
        "expected ',' or '}'",
        "the mapping `{{` that opens here is not closed",
        "put `,` between its entries and `}}` at its end",
    ),
    (
        "expected <block end>, but found ':'",
        "a key is missing before `:`",
        "put it there, or quote the text",
    ),
    (
        "expected <block end>",
        "the indentation matches no line above",
        "lines of one section start in the same column",
    ),
    (
        "found unknown escape character '(.)'",
        "`\\{0}` is not an escape sequence in double quotes",
        "use single quotes, or write `\\\\`",
    ),
    ("expected escape sequence", "the escape sequence is not complete", "use single quotes"),
    ("found undefined tag handle", "a tag is not allowed", "quote text that begins with `!`"),
    (
        "sequence entries are not allowed",
        "`- ` is not allowed here",
        "put the list on the next lines, below its key",
    ),
    ("block mapping|block keys", "a key is not allowed here", "put it on its own line"),
)
_OPENING = ("quotes that open", "that opens here")


def explain(error: yaml.MarkedYAMLError, text: str, *, source: str) -> Problem:
    """Convert an error of PyYAML to a problem."""
    error_text = f"{error.problem or ''} {error.context or ''}"
    message, hint = f"not YAML: {(error.problem or error.context or 'cannot be read').strip()}", ""
    for pattern, our_message, our_hint in _MESSAGES:
        found = re.search(pattern, error_text)
        if found:
            message, hint = our_message.format(*found.groups()), our_hint.format()
            break
    mark = error.problem_mark or error.context_mark
    begins = (*_OPENING, _NO_KEY[0])
    if any(words in message for words in begins) and error.context_mark is not None:
        mark = error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    lines = split_lines(text)
    above = lines[line - 2] if 1 < line <= len(lines) else ":"
    # PyYAML read the line above as the beginning of the key
    if message.startswith("`:`") and above.strip() and ":" not in above:
        message, hint = _NO_KEY
        line, column = line - 1, len(above) - len(above.lstrip()) + 1
    return Problem(source, min(line, len(lines)), column, "", message, hint=hint)


MAX_DEPTH: Final = 50
MAX_NODES: Final = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_START: Final = "`kdist init` writes one"


class Mark(NamedTuple):
    """A position: line and column, counted from 1, and the width in columns. Line 0 is a `--set`
    option.
    """

    source: str
    line: int
    column: int
    width: int = 1


@dataclass
class YamlNode:
    """A value and its position. Aliases share nodes, so a complete node is never changed."""

    kind: str  # "mapping", "list" or "scalar"
    mark: Mark
    scalar: Scalar = None
    text: str = ""  # a scalar as it was written, without quotes
    plain: bool = False  # a scalar without quotes
    entries: dict[str, tuple[Mark, YamlNode]] = field(default_factory=dict)
    items: list[YamlNode] = field(default_factory=list)
    size: int = 1  # nodes below and including this one, aliases counted each time
    depth: int = 1

    def value(self) -> Any:
        """Plain Python values."""
        if self.kind == "mapping":
            return {key: node.value() for key, (_, node) in self.entries.items()}
        return [node.value() for node in self.items] if self.kind == "list" else self.scalar


class _Stop(Exception):  # noqa: N818 - control flow: carries the problem that ends the parse
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def read(text: str, *, source: str) -> tuple[list[YamlNode], list[Problem]]:
    """Parse a job file. Returns the tree of each of its documents and the problems of its YAML;
    there is no tree after a mistake that makes the rest unreliable.
    """
    reader = _Reader(source)
    last, problems = _parse(text, reader)
    if problems and last is None:
        return [], problems
    documents = [*reader.documents, *([] if last is None else [last])]
    trees = [each for each in documents if each.kind != "scalar" or each.scalar is not None]
    if not trees:
        return [], [*problems, Problem(source, 1, 1, "", "the file is empty", hint=_START)]
    for tree in trees:
        if tree.kind != "mapping":
            what = "a list" if tree.kind == "list" else f"the text `{shown(tree.text, 40)}`"
            message = f"must be a mapping that starts with apiVersion and kind, found {what}"
            place = tree.mark
            problems.append(Problem(source, place.line, place.column, "", message, hint=_START))
    return [tree for tree in trees if tree.kind == "mapping"], problems


def read_value(text: str, *, source: str) -> tuple[YamlNode | None, list[Problem]]:
    """Parse one value from the command line; its marks have line 0."""
    text, problems = decode(text, source=source)
    tree = None
    if not problems:
        tree, problems = _parse(text, _Reader(source, inline=True))
    return tree, [each._replace(line=0, column=0) for each in problems]


def _parse(text: str, reader: _Reader) -> tuple[YamlNode | None, list[Problem]]:
    try:
        for event in parse_events(text):
            reader.handle(event)
    except _Stop as stop:
        return None, [*reader.problems, stop.problem]
    except yaml.MarkedYAMLError as error:
        return None, [*reader.problems, explain(error, text, source=reader.source)]
    return reader.document, reader.problems


class _Reader:
    """Builds the tree from PyYAML's events; `document` is complete after the last event, and
    `documents` are those before it.
    """

    def __init__(self, source: str, *, inline: bool = False) -> None:
        self.source = source
        self._inline = inline
        self.document: YamlNode | None = None
        self.documents: list[YamlNode] = []
        self.problems: list[Problem] = []
        self._open: list[YamlNode] = []
        # per open mapping, the key whose value comes next
        self._keys: list[tuple[str, Mark] | None] = []
        self._names: list[str | None] = []  # the anchor of each open collection
        self._anchors: dict[str, YamlNode | None] = {}
        self._nodes = 0

    def handle(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self.document is not None:
            if self._inline:
                raise _Stop(self._problem(event, "must be one value, found two YAML documents"))
            self.documents.append(self.document)
            self.document = None
            self._anchors.clear()
        if isinstance(event, yaml.AliasEvent):
            self._add(self._alias(event), event)
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._start(event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            node = self._open.pop()
            self._keys.pop()
            name = self._names.pop()
            if name is not None:
                self._anchors[name] = node
            self._add(node, event)

    def _problem(self, event: yaml.Event, message: str, hint: str = "") -> Problem:
        mark = self._mark(event)
        return Problem(
            self.source, mark.line, mark.column, "", message, hint=hint, width=mark.width
        )

    def _mark(self, event: yaml.Event) -> Mark:
        if self._inline:
            return Mark(self.source, 0, 0)
        start, end = event.start_mark, event.end_mark
        # parsed events always have marks
        if start is None or end is None:
            return Mark(self.source, 1, 1)
        width = end.column - start.column if end.line == start.line else 1
        return Mark(self.source, start.line + 1, start.column + 1, max(width, 1))

    def _check_properties(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.tag is not None:
            tag = shown(event.tag.replace("tag:yaml.org,2002:", "!!"), 40)
            self.problems.append(
                self._problem(
                    event,
                    f"the tag `{tag}` is not allowed",
                    "job files need no tags; quote text instead",
                )
            )
        if event.anchor is not None:
            self._anchors[event.anchor] = None

    def _start(self, event: yaml.CollectionStartEvent) -> None:
        if self._open and self._open[-1].kind == "mapping" and self._keys[-1] is None:
            raise _Stop(
                self._problem(
                    event, "a key must be text", "in `{…}` and `[…]` use quotes if text is meant"
                )
            )
        if len(self._open) >= MAX_DEPTH:
            raise _Stop(self._problem(event, f"nested deeper than {MAX_DEPTH} levels"))
        self._check_properties(event)
        kind = "mapping" if isinstance(event, yaml.MappingStartEvent) else "list"
        self._open.append(YamlNode(kind, self._mark(event)._replace(width=1)))
        self._keys.append(None)
        self._names.append(event.anchor)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        self._check_properties(event)
        plain = event.style is None
        text = event.value
        # JSON writes 😀 as two escapes, which YAML reads as two surrogates
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        node = YamlNode("scalar", self._mark(event), text=text, plain=plain)
        expects_key = self._open and self._open[-1].kind == "mapping" and self._keys[-1] is None
        try:
            node.scalar = text
            if plain and not expects_key:
                node.scalar = resolve(text)
        except ValueError as error:
            self.problems.append(self._problem(event, str(error)))
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._add(node, event)

    def _alias(self, event: yaml.AliasEvent) -> YamlNode:
        if event.anchor not in self._anchors:
            raise _Stop(
                self._problem(
                    event,
                    (
                        f"the alias `*{shown(event.anchor, 40)}` has no anchor "
                        f"`&{shown(event.anchor, 40)}` before it"
                    ),
                )
            )
        node = self._anchors[event.anchor]
        if node is None:
            raise _Stop(
                self._problem(
                    event, f"the alias `*{shown(event.anchor, 40)}` is inside its own anchor"
                )
            )
        if len(self._open) + node.depth > MAX_DEPTH:
            raise _Stop(self._problem(event, f"nested deeper than {MAX_DEPTH} levels by aliases"))
        return node

    def _add(self, node: YamlNode, event: yaml.Event) -> None:
        """Add a complete node: to the open list, as a key, as a key's value, or as the document."""
        if not self._open:
            self.document = node
            return
        parent = self._open[-1]
        if parent.kind == "mapping" and self._keys[-1] is None:
            self._keys[-1] = self._key(node, event)
            return
        parent.size += node.size
        parent.depth = max(parent.depth, node.depth + 1)
        if parent.size > MAX_NODES:
            raise _Stop(
                self._problem(
                    event,
                    f"the file has more than {MAX_NODES} values, including aliases",
                )
            )
        waiting = self._keys[-1]
        if waiting is None:
            parent.items.append(node)
            return
        self._keys[-1] = None
        key, mark = waiting
        if key in parent.entries:
            first = parent.entries[key][0]
            message = (
                f"the key `{shown(key)}` is already defined at line {first.line}, column "
                f"{first.column}"
            )
            self.problems.append(
                Problem(
                    self.source,
                    mark.line,
                    mark.column,
                    "",
                    message,
                    hint="keep one",
                    width=mark.width,
                )
            )
            return
        parent.entries[key] = (mark, node)

    def _key(self, node: YamlNode, event: yaml.Event) -> tuple[str, Mark]:
        if node.kind != "scalar":
            raise _Stop(self._problem(event, "a key must be text"))
        mark = self._mark(event)
        if node.plain and node.text == "<<":
            hint = (
                "it belongs to YAML 1.1; write the fields out, or use an alias for a whole section"
            )
            self.problems.append(self._problem(event, "the merge key `<<` is not supported", hint))
        elif not node.text:
            self.problems.append(self._problem(event, "a key is empty"))
        return node.text, mark
