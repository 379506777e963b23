"""`--set path=value`: values from the command line merged into the tree of a job file, with types
from the model.

`spec.env[0].value` names a list's item (one past the end appends),
`spec.nodeSelector["example.com/disk"]` a key with dots. The value is YAML (`{min: 1, max: 4}`)
unless the field accepts only text, which is used unchanged. `null` removes the field, so that its
default applies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdist.errors import Problem
from kdist.job_file.yaml_parser import Mark, YamlNode, read_value, shown
from kdist.spec import reference
from kdist.spec.reference import Path, near_path, parse, show


class OptionOverride(str):
    """`path=value` that another option than `--set` stands for; problems name that option."""

    def __new__(cls, override: str, option: str) -> OptionOverride:
        """Keep the option as it was typed."""
        made = super().__new__(cls, override)
        made.option = option
        return made

    option: str


def override(tree: YamlNode, overrides: Sequence[str]) -> tuple[YamlNode, list[Problem]]:
    """The tree with all overrides merged in order, and the problems of invalid overrides."""
    problems: list[Problem] = []
    for each in overrides:
        source = each.option if isinstance(each, OptionOverride) else f"--set {shown(each, 120)}"
        mark = Mark(source, 0, 0)
        text, equals, value = _split(each)
        path = parse(text)
        if not equals or path is None:
            hint = "for example --set spec.nodes=2"
            problems.append(mark.problem("must be path=value", hint=hint))
            continue
        field = reference.find(path)
        if field is None or not path:
            if show(path) in reference.REMOVED:
                hint = reference.REMOVED[show(path)]
                problems.append(mark.problem("no longer exists", path=show(path), hint=hint))
                continue
            near = near_path(path)
            problems.append(
                mark.problem("there is no such field", path=show(path), suggestion=near)
            )
            continue
        node, found = _value(value, field, source)
        problems.extend(found)
        if not found:
            changed = _set(tree, path, node, reference.root(), mark)
            if changed is None:
                hint = "an index one past the end appends"
                problems.append(
                    mark.problem("the list has no such item", path=show(path), hint=hint)
                )
            else:
                tree = changed
    return tree, problems


def _split(option: str) -> tuple[str, str, str]:
    """Path, `=` and value; a quoted key may contain `=`."""
    bracket = option.rfind("]", 0, option.find("=") + 1)
    quoted = re.match(r"""[^="']*(\[["'][^"']+["']\][^="']*)*""", option)
    end = option.find("=", quoted.end() if quoted else max(bracket, 0))
    return (option[:end], "=", option[end + 1 :]) if end >= 0 else (option, "", "")


def _value(text: str, field: reference.Field, source: str) -> tuple[YamlNode | None, list[Problem]]:
    """The node of a value, or None to remove the field."""
    if text.strip() == "null":
        return None, []
    if field.takes_only_text:
        return YamlNode("scalar", Mark(source, 0, 0), scalar=text, text=text), []
    node, problems = read_value(text, source=source)
    if node is None and not problems:
        mark = Mark(source, 0, 0)
        problems = [
            mark.problem("the value is empty", path=field.path, hint="null removes a field")
        ]
    return node, problems


def _set(
    node: YamlNode | None,
    path: Path,
    value: YamlNode | None,
    field: reference.Field | None,
    mark: Mark,
) -> YamlNode | None:
    """A copy of `node` with `value` at `path`; None if a list has no such item."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(head, int):
        items = list(node.items) if node is not None and node.kind == "list" else []
        if head > len(items):
            return None
        item = _set(
            items[head] if head < len(items) else None, rest, value, field and field.item, mark
        )
        if item is not None or not rest:
            items[head : head + 1] = [] if item is None else [item]
        return YamlNode("list", node.mark if node is not None else mark, items=items)
    entries = (
        dict(node.entries)
        if node is not None and node.kind == "mapping"
        else _expanded_entries(node, field, mark)
    )
    if not rest and value is None:
        entries.pop(head, None)
    else:
        key_mark, child = entries.get(head, (mark, None))
        changed = _set(child, rest, value, field and field.children.get(head, field.entry), mark)
        if changed is None:
            return None
        entries[head] = (key_mark if child is not None and rest else mark, changed)
    return YamlNode("mapping", node.mark if node is not None else mark, entries=entries)


def _expanded_entries(
    node: YamlNode | None, field: reference.Field | None, mark: Mark
) -> dict[str, tuple[Mark, YamlNode]]:
    """The required fields of a section in its long form, before one of them is set: `nodes: 2` and
    the default of nodes both stand for min and max.
    """
    if field is None or not isinstance(field.default, dict):
        return {}
    short = node is not None and isinstance(node.scalar, int)
    values = {
        name: node.scalar if node is not None and short else field.default.get(name)
        for name in field.children
    }
    return {
        name: (mark, YamlNode("scalar", mark, scalar=values[name], text=str(values[name])))
        for name, child in field.children.items()
        if child.required and values[name] is not None
    }
