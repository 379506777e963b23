"""The tables of docs/explanation/security.md: the rights of roles, pods and the controller. What is
around them is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from kdist.rbac import Right
from kdist_controller import rbac as controller_rbac
from tools.reference import rights

PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"
_BLOCK: Final = re.compile(
    r"(<!-- table of (?P<name>[\w ]+): python -m tools\.reference -->\n)"
    r"(?:(?!<!--).*\n)*(<!-- end -->)"
)


def render() -> str:
    """The page with fresh tables. Raises `KeyError` for a table that nobody makes."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found['name']]()}\n{found[3]}"

    return _BLOCK.sub(replace, PAGE.read_text(encoding="utf-8"))


def _roles() -> str:
    found = [
        (f"`{role}`", rule)
        for role in ("view", "edit")
        for part in rights.PARTS
        for rule in rights.rules(role, part)
    ]
    return _table("role", found)


def _controller() -> str:
    tables: dict[str, Iterable[Right]] = {
        "the namespaces whose TrainingJobs it acts on": controller_rbac.JOBS,
        "the cluster": controller_rbac.NODES,
        "`kube-node-lease`": controller_rbac.NODE_LEASES,
        "its own namespace": controller_rbac.ELECTION,
    }
    found = [(where, rule) for where, table in tables.items() for rule in rights.to_rules(table)]
    return _table("in", found)


def _table(title: str, found: Iterable[tuple[str, dict[str, list[str]]]]) -> str:
    rows = [f"| {title} | verbs | resources |", "|---|---|---|"]
    for where, rule in found:
        group = rule["apiGroups"][0]
        names = ", ".join(f"{each}.{group}" if group else each for each in rule["resources"])
        rows.append(f"| {where} | {', '.join(rule['verbs'])} | {names} |")
    return "\n".join(rows)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "rights of roles": _roles,
    "rights of the controller": _controller,
}
