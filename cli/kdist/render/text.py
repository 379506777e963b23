"""Manifests as text: YAML or JSON, and YAML whose lines say which field of job.yaml they come from.
The same bytes every time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import yaml

from kdist.manifest import Manifest

Path = tuple[str | int, ...]

# What YAML 1.1 (PyYAML, half of Go's), YAML 1.2 or Go's parsers take for something else than text
# where it is bare.
_WORDS = frozenset(
    {"", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n", ".nan", "<<", "="}
)
_NUMBER = re.compile(r"[-+._]*(?:[0-9][-+.:_0-9a-fotxz \t]*|inf)", re.IGNORECASE)
# What one parser takes for a line break and another does not, or that only an escape keeps.
_ESCAPED = re.compile("[\r\x85\u2028\u2029\ufeff]")


def to_json(manifests: Iterable[Manifest]) -> str:
    """One document that `kubectl apply --server-side -f -` takes: a List."""
    items = [each.document for each in manifests]
    return json.dumps(
        {"apiVersion": "v1", "kind": "List", "items": items}, indent=2, ensure_ascii=False
    )


def to_yaml(manifests: Iterable[Manifest], *, annotate: bool = False) -> str:
    """Documents that `kubectl apply --server-side -f -` takes; with `annotate`, comments name the
    fields of job.yaml.
    """
    return "---\n".join(_document(each, annotate=annotate) for each in manifests).removesuffix("\n")


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays readable, nothing is folded, and nothing becomes an alias of
    something else.
    """

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True

    def represent_text(self, data: str) -> Any:
        """Text of several lines as a block, where YAML can; quoted, what a parser would read as
        something else.
        """
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=_style(data))

    yaml_representers: ClassVar[dict[Any, Any]] = {
        **yaml.SafeDumper.yaml_representers,
        str: represent_text,
    }


def _style(text: str) -> str | None:
    """How to write a text so that every parser reads the same; None where it can stand bare, as far
    as its content goes.
    """
    if _ESCAPED.search(text):
        return '"'
    if "\n" in text:
        # Go's parser refuses a block whose first line opens with a tab; one that opens with a space
        # needs a count of columns.
        return "|" if not text[0].isspace() and not text.endswith(" ") else '"'
    return "'" if text.lower() in _WORDS or _NUMBER.fullmatch(text) else None


def _document(manifest: Manifest, *, annotate: bool) -> str:
    text: str = yaml.dump(
        manifest.document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31
    )
    if not annotate:
        return text
    lines = text.split("\n")
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    for line, source in _places(tree, (), manifest.sources):
        lines[line] += f"  # {source}"
    return "\n".join(lines)


def _places(
    node: Any, path: Path, sources: Mapping[Path, str], line: int = 0
) -> Iterator[tuple[int, str]]:
    """The lines on which leaves with a source begin. A block of text is marked on the line of its
    key.
    """
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _places(value, (*path, key.value), sources, key.start_mark.line)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _places(item, (*path, index), sources, item.start_mark.line)
    elif path in sources:
        yield line, sources[path]
