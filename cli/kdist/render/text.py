"""Writes manifests as YAML or JSON, optionally with comments that name the field of job.yaml that a
line comes from. Deterministic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import yaml

from kdist.manifest import Manifest
from kdist.terminal import visible
from kdist.yaml_text import needs_escapes

Path = tuple[str | int, ...]

# What YAML 1.1 (PyYAML, partly Go), YAML 1.2 or Go's parsers do not read as text without quotes.
_WORDS = frozenset(
    {"", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n", ".nan", "<<", "="}
)
_NUMBER = re.compile(r"[-+._]*(?:[0-9][-+.:_0-9a-fotxz \t]*|inf)", re.IGNORECASE)


def to_yaml(manifests: Iterable[Manifest], *, annotate: bool = False) -> str:
    """Manifests as YAML documents for `kubectl apply --server-side -f -`; with `annotate`, comments
    name the fields of job.yaml.
    """
    return "---\n".join(_document(each, annotate=annotate) for each in manifests).removesuffix("\n")


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as blocks, without folding and aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True

    def represent_text(self, data: str) -> Any:
        """Write multi-line text as a block if possible; quote text that could be misread."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=_style(data))

    yaml_representers: ClassVar[dict[Any, Any]] = {
        **yaml.SafeDumper.yaml_representers,
        str: represent_text,
    }


def _style(text: str) -> str | None:
    """The style in which all parsers read a text identically; None if it needs no quotes."""
    if needs_escapes(text):
        return '"'
    if "\n" in text:
        # Go's parser rejects a block whose first line starts with a tab; one that starts with a
        # space needs an indentation indicator.
        return "|" if not text[0].isspace() and not text.endswith(" ") else '"'
    return "'" if text.lower() in _WORDS or _NUMBER.fullmatch(text) else None


def _document(manifest: Manifest, *, annotate: bool) -> str:
    text: str = yaml.dump(
        manifest.document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31
    )
    text = visible(text, keep="\n\t")  # escapes within double quotes
    if not annotate:
        return text
    lines = text.split("\n")
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    for line, source in _source_lines(tree, (), manifest.sources):
        lines[line] += f"  # {source}"
    return "\n".join(lines)


def _source_lines(
    node: Any, path: Path, sources: Mapping[Path, str], line: int = 0
) -> Iterator[tuple[int, str]]:
    """The lines of leaves with a source. A text block gets its comment on the line of its key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _source_lines(value, (*path, key.value), sources, key.start_mark.line)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _source_lines(item, (*path, index), sources, item.start_mark.line)
    elif path in sources:
        yield line, sources[path]
