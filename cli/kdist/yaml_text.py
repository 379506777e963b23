"""The one reader of YAML: whatever a text contains, it returns plain values within bounds, or
raises `MalformedTextError`; and the writer of YAML whose text a terminal may show.

Size, depth and the number of values are bounded before anything is built: PyYAML builds values by
recursion, and aliases make small texts large. Tags that nobody has asked for are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import yaml

from kdist.terminal import visible
from kdist_trainer.formats.untrusted_text import MalformedTextError, too_deep

MAX_BYTES: Final = 4 << 20
MAX_DEPTH: Final = 100
MAX_VALUES: Final = 200_000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Construct = Callable[[Any, Any], Any]
"""Makes a value of a tag: receives PyYAML's loader and the node."""


def parse_events(text: str) -> Iterator[yaml.Event]:
    """Yield PyYAML's events, with positions and the messages of its parser in Python, for a caller
    that counts what it builds. Raises `yaml.MarkedYAMLError`.
    """
    yield from yaml.parse(text, Loader=yaml.SafeLoader)


def parse_yaml(text: str | bytes, *, tags: Mapping[str, Construct] | None = None) -> list[Any]:
    """The documents of a YAML text. Raises `MalformedTextError`, which says where, if it is not
    YAML or exceeds a bound.

    Args:
        text: bytes must be UTF-8.
        tags: what makes the values of tags beyond those of YAML's core.
    """
    if len(text) > MAX_BYTES:
        raise MalformedTextError(f"is larger than {MAX_BYTES} bytes")

    class Loader(_LOADER):  # type: ignore[misc]  # chosen when it runs
        yaml_constructors: ClassVar[dict[Any, Any]] = {**_LOADER.yaml_constructors, **(tags or {})}

    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        _check_bounds(decoded)
        return list(yaml.load_all(decoded, Loader=Loader))
    except MalformedTextError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise MalformedTextError(f"is not YAML{place}: {error.problem}") from None
    # a date that does not exist, a number that is too long, a key that is a list
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedTextError(f"is not YAML: {error}") from None


def _check_bounds(text: str) -> None:
    depth = values = 0
    sizes: dict[str, int] = {}  # of what anchors name, with aliases counted each time
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            opened.append((event.anchor, values))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            # an alias within its own anchor has no size yet, and no end
            values += sizes.get(event.anchor or "", MAX_VALUES)
        values += 1
        if depth > MAX_DEPTH:
            raise too_deep(MAX_DEPTH)
        if values > MAX_VALUES:
            raise MalformedTextError(f"has more than {MAX_VALUES} values, including aliases")


def needs_escapes(text: str) -> bool:
    """Whether a text has characters that a terminal would not draw, apart from line breaks and
    tabs, so that it must be written in double quotes.
    """
    return visible(text, keep="\n\t") != text


class _Dumper(yaml.SafeDumper):
    """Quotes text with characters that are written out afterwards."""

    def represent_text(self, data: str) -> Any:
        """Quote the text where its escapes must be read as such."""
        style = '"' if needs_escapes(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    yaml_representers: ClassVar[dict[Any, Any]] = {
        **yaml.SafeDumper.yaml_representers,
        str: represent_text,
    }


def to_yaml(value: Any) -> str:
    """Plain values as YAML. What a terminal would not draw is escaped, in double quotes."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return visible(text, keep="\n\t").rstrip("\n")
