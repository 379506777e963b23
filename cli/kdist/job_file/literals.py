"""Finds texts of a job file that reach the training as they are written, where other programs would
change them, or in two parts where one was meant: `$(NAME)`, which Kubernetes replaces in the
variables and arguments of a container, and a comma in an argument within `[…]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from kdist.errors import Problem
from kdist.job_file.yaml_parser import SPLIT, YamlNode, shown

_REFERENCE: Final = re.compile(r"(?<!\$)\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_LISTS: Final = (("spec", "script", "args"), ("spec", "preflight", "command"))


def find_literals(tree: YamlNode) -> Iterator[Problem]:
    """Warnings about such texts, each with its place."""
    for index, variable in enumerate(_find(tree, ("spec", "env")).items):
        value = variable.entries.get("value")
        if value is not None:
            yield from _find_reference(value[1], f"spec.env[{index}].value")
    for path in _LISTS:
        items, shown_path = _find(tree, path).items, ".".join(path)
        for index, item in enumerate(items):
            yield from _find_reference(item, f"{shown_path}[{index}]")
        for index, (before, item) in enumerate(pairwise(items), 1):
            begins = before.plain and "=" in before.text
            goes_on = item.plain and not item.text.startswith("-") and "=" not in item.text
            if item.follows_comma and begins and goes_on:
                message = f"`{shown(item.text)}` is an argument of its own"
                yield item.mark.problem(message, path=f"{shown_path}[{index}]", hint=SPLIT)


def _find(tree: YamlNode, path: tuple[str, ...]) -> YamlNode:
    for name in path:
        _, tree = tree.entries.get(name, (tree.mark, YamlNode("mapping", tree.mark)))
    return tree


def _find_reference(node: YamlNode, path: str) -> Iterator[Problem]:
    if found := _REFERENCE.search(node.text):
        yield node.mark._replace(width=1).problem(
            f"`{shown(found[0])}` reaches the training as it is written, on a cluster as in "
            "`kdist run`",
            path=path,
            hint=f"write the value, or read `{shown(found[1])}` from the environment in the code; "
            "Kubernetes replaces it only in podTemplate",
        )
