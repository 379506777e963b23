"""Parses YAML text into a tree of nodes with positions, within limits on size and depth, and
converts PyYAML's syntax errors to problems with a hint.

The tree is composed from PyYAML's events rather than by its composer, which knows no bounds and
ends at the first mistake; keys keep their original text.

Plain scalars are resolved as in YAML 1.2's core schema, with hints for text that YAML 1.1 reads as
numbers. A job file is decoded as UTF-8 of at most `MAX_BYTES` without control characters; lines
are counted as YAML counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

import yaml

from kdist.errors import InvalidJobError, Problem
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


def number_hint(text: str, *, plain: bool, seconds: bool = True) -> str:
    """How to write the number, of `seconds` or of something else, that a text was probably meant
    as; empty if there is none.
    """
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
    if seconds and (duration := _seconds(text)) is not None:
        return f"the field counts seconds; write {duration}"
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
            f"the file is larger than {MAX_BYTES >> 20} MiB",
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
        character = (
            "a NUL character: this is not a text file"
            if code == 0
            else f"the control character U+{code:04X}"
        )
        return refuse(
            f"the file contains {character}",
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
SPLIT: Final = 'in `[…]` a comma ends an item: quote the whole one, as in ["--betas=0.9,0.95"]'


class Mark(NamedTuple):
    """A position: line and column, counted from 1, and the width in columns. Line 0 is a `--set`
    option.
    """

    source: str
    line: int
    column: int
    width: int = 1

    def problem(
        self, message: str, *, path: str = "", suggestion: str = "", hint: str = ""
    ) -> Problem:
        """A problem at this position."""
        place = self.source, self.line, self.column
        return Problem(*place, path, message, suggestion, hint, width=self.width)


@dataclass
class YamlNode:
    """A value and its position. Aliases share nodes, so a complete node is never changed."""

    kind: str  # "mapping", "list" or "scalar"
    mark: Mark
    scalar: Scalar = None
    text: str = ""  # a scalar as it was written, without quotes
    plain: bool = False  # a scalar without quotes
    follows_comma: bool = False  # an item of `[…]` without a space before it
    entries: dict[str, tuple[Mark, YamlNode]] = field(default_factory=dict)
    items: list[YamlNode] = field(default_factory=list)
    size: int = 1  # nodes below and including this one, aliases counted each time
    depth: int = 1

    def value(self) -> Any:
        """Plain Python values."""
        if self.kind == "mapping":
            return {key: node.value() for key, (_, node) in self.entries.items()}
        return [node.value() for node in self.items] if self.kind == "list" else self.scalar


def read(text: str, *, source: str) -> tuple[list[YamlNode], list[Problem]]:
    """Parse a job file. Returns the tree of each of its documents and the problems of its YAML;
    there is no tree after a mistake that makes the rest unreliable.
    """
    documents, problems = _parse(text, source=source)
    trees = [each for each in documents if each.kind != "scalar" or each.scalar is not None]
    if not trees and not (problems and not documents):
        problems.append(Problem(source, 1, 1, "", "the file is empty", hint=_START))
    for tree in trees:
        if tree.kind != "mapping":
            found = "a list" if tree.kind == "list" else f"the text `{shown(tree.text, 40)}`"
            message = f"must be a mapping that starts with apiVersion and kind, found {found}"
            problems.append(tree.mark._replace(width=1).problem(message, hint=_START))
    return [tree for tree in trees if tree.kind == "mapping"], problems


def read_value(text: str, *, source: str) -> tuple[YamlNode | None, list[Problem]]:
    """Parse one value from the command line; its marks have line 0."""
    text, problems = decode(text, source=source)
    trees: list[YamlNode] = []
    if not problems:
        trees, problems = _parse(text, source=source, inline=True)
    return next(iter(trees), None), [each._replace(line=0, column=0) for each in problems]


def _parse(text: str, *, source: str, inline: bool = False) -> tuple[list[YamlNode], list[Problem]]:
    composer = _Composer(text, source, inline=inline)
    try:
        return composer.compose_documents(), composer.problems
    except InvalidJobError as error:
        return [], [*composer.problems, *error.problems]
    except yaml.MarkedYAMLError as error:
        return [], [*composer.problems, explain(error, text, source=source)]


class _Composer:
    """Composes the trees from PyYAML's events, as its own composer does. A problem after which the
    rest can be read is in `problems`; the others are raised as `InvalidJobError`.
    """

    def __init__(self, text: str, source: str, *, inline: bool) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._inline = inline
        self._events: Iterator[Any] = parse_events(text)
        self._last: Any = None  # the event that ends what was composed last
        self._anchors: dict[str, YamlNode | None] = {}  # None while the node is incomplete

    def compose_documents(self) -> list[YamlNode]:
        found: list[YamlNode] = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if found and self._inline:
                    self._refuse(event, "must be one value, found two YAML documents")
                self._anchors.clear()
                found.append(self._compose(next(self._events), 0))
        return found

    def _compose(self, event: Any, depth: int, *, is_key: bool = False) -> YamlNode:
        """The node that begins with `event`, below `depth` collections."""
        self._last = event
        if isinstance(event, yaml.AliasEvent):
            name = shown(event.anchor, 40)
            if event.anchor not in self._anchors:
                self._refuse(event, f"the alias `*{name}` has no anchor `&{name}` before it")
            node = self._anchors[event.anchor]
            if node is None:
                self._refuse(event, f"the alias `*{name}` is inside its own anchor")
            if depth + node.depth > MAX_DEPTH:
                self._refuse(event, f"nested deeper than {MAX_DEPTH} levels by aliases")
            return node
        if is_key and not isinstance(event, yaml.ScalarEvent):
            hint = "in `{…}` and `[…]` use quotes if text is meant"
            self._refuse(event, "a key must be text", hint)
        if depth >= MAX_DEPTH and not isinstance(event, yaml.ScalarEvent):
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        if event.tag is not None:
            tag = shown(event.tag.replace("tag:yaml.org,2002:", "!!"), 40)
            hint = "job files need no tags; quote text instead"
            self._report(event, f"the tag `{tag}` is not allowed", hint)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self._compose_scalar(event, is_key=is_key)
        else:
            node = self._compose_collection(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _compose_scalar(self, event: yaml.ScalarEvent, *, is_key: bool) -> YamlNode:
        text: str = event.value
        # JSON writes 😀 as two escapes, which YAML reads as two surrogates
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if "\0" in text:  # of an escape; also where any text is taken, as in podTemplate
            self._report(event, "the text has a NUL character, which no program takes")
            text = text.replace("\0", "")  # named once
        plain = event.style is None
        node = YamlNode("scalar", self._mark(event), text, text, plain)
        try:
            if plain and not is_key:
                node.scalar = resolve(text)
        except ValueError as error:
            self._report(event, str(error))
        return node

    def _compose_collection(self, start: Any, depth: int) -> YamlNode:
        mark = self._mark(start)._replace(width=1)
        is_mapping = isinstance(start, yaml.MappingStartEvent)
        node = YamlNode("mapping" if is_mapping else "list", mark)
        while not isinstance(event := next(self._events), yaml.CollectionEndEvent):
            if is_mapping:
                key, mark = self._compose_key(event, depth + 1), self._mark(event)
                event = next(self._events)
            before: Any = self._last.end_mark
            child = self._compose(event, depth + 1)
            # an alias is the node of its anchor, which is not changed
            if not is_mapping and node.items and isinstance(event, yaml.ScalarEvent):
                child.follows_comma = before.index + 1 == self._last.start_mark.index
            node.size += child.size
            node.depth = max(node.depth, child.depth + 1)
            if node.size > MAX_NODES:
                message = f"the file has more than {MAX_NODES} values, including aliases"
                self._refuse(self._last, message)
            if not is_mapping:
                node.items.append(child)
            elif key in node.entries:
                first = node.entries[key][0]
                place = f"line {first.line}, column {first.column}"
                message = f"the key `{shown(key)}` is already defined at {place}"
                self.problems.append(mark.problem(message, hint="keep one"))
            else:
                node.entries[key] = (mark, child)
        self._last = event
        return node

    def _compose_key(self, event: Any, depth: int) -> str:
        node = self._compose(event, depth, is_key=True)
        if node.kind != "scalar":
            self._refuse(event, "a key must be text")
        if node.plain and node.text == "<<":
            hint = (
                "it belongs to YAML 1.1; write the fields out, or use an alias for a whole section"
            )
            self._report(event, "the merge key `<<` is not supported", hint)
        elif not node.text:
            self._report(event, "a key is empty")
        return node.text

    def _mark(self, event: Any) -> Mark:
        if self._inline:
            return Mark(self._source, 0, 0)
        start, end = event.start_mark, event.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return Mark(self._source, start.line + 1, start.column + 1, max(width, 1))

    def _report(self, event: Any, message: str, hint: str = "") -> None:
        self.problems.append(self._mark(event).problem(message, hint=hint))

    def _refuse(self, event: Any, message: str, hint: str = "") -> NoReturn:
        raise InvalidJobError(self._source, [self._mark(event).problem(message, hint=hint)])
