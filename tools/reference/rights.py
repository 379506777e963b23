"""The rules of roles from the tables of rights of kdist and its controller, and the texts of the
chart and the documentation that have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias, get_args

from kdist import rbac
from kdist.manifest import TRAINING_JOB
from kdist.rbac import Right
from kdist_controller import rbac as controller_rbac

_CORE: Final = '""'  # the API group of pods, as a rule of RBAC writes it
_ORDER: Final = ("get", "list", "watch", "create", "patch", "update", "delete")
_KUBECTL: Final = rbac.Need(
    "edit, replace, scale of TrainingJobs by kubectl",
    "edit",
    (
        Right("update", *TRAINING_JOB),
        *(Right(verb, *TRAINING_JOB, "scale") for verb in ("get", "patch", "update")),
    ),
)  # in the chart's role alone: no command of kdist needs them
Part: TypeAlias = Literal["objects", "workloads", "trainingJobs"]
PARTS: tuple[Part, ...] = get_args(Part)
"""The lists of rules that a role of the chart consists of."""


def rules(role: Literal["view", "edit"], part: Part) -> list[dict[str, list[str]]]:
    """RBAC rules of a part of a role of the chart; `edit` contains only what `view` lacks."""
    wanted = [
        (need, each)
        for need in (*rbac.NEEDS, _KUBECTL)
        for each in (rbac.workload_rights(need.workload) if part == "workloads" else need.rights)
        if ((each.api_version, each.kind) == TRAINING_JOB) is (part == "trainingJobs")
    ]
    reading = {each for need, each in wanted if rbac.role_of(need, each) == "view"}
    held = reading if role == "view" else {each for _, each in wanted} - reading
    return to_rules(held)


def to_rules(rights: Iterable[Right]) -> list[dict[str, list[str]]]:
    """RBAC rules with these rights and no others."""
    verbs: dict[tuple[str, str], set[str]] = {}
    for each in rights:
        verbs.setdefault((each.group, each.resource), set()).add(each.verb)
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (group, resource), found in sorted(verbs.items()):
        together.setdefault((group, tuple(sorted(found, key=_ORDER.index))), []).append(resource)
    return [
        {"apiGroups": [group], "resources": names, "verbs": list(found)}
        for (group, found), names in together.items()
    ]


def define_rules(name: str, found: Iterable[dict[str, list[str]]]) -> str:
    """Text of a named list of rules."""
    lines = [f'{{{{- define "kdist.rules.{name}" -}}}}\n']
    for rule in found:
        texts = [f"  {key}: [{', '.join(values) or _CORE}]\n" for key, values in rule.items()]
        lines.append("-" + "".join(texts)[1:])
    return "".join([*lines, "{{- end }}\n"])


def roles_template() -> str:
    """Text of the chart's `_rules.tpl`: named lists of rules."""
    parts = [
        "{{/* Made from the table of rights in cli/kdist/rbac.py: python -m "
        "tests.charts.rights_files */}}\n"
    ]
    for role in ("view", "edit"):
        parts += [define_rules(f"{role}.{part}", rules(role, part)) for part in PARTS]
    return "".join(parts)


def table() -> str:
    """The table of rights as Markdown."""
    rows = [
        "| commands | verbs and resources | on the workload | without it | role |",
        "|---|---|---|---|---|",
    ]
    for need in rbac.NEEDS:
        verbs: dict[str, list[str]] = {}
        for right in need.rights:
            verbs.setdefault(str(right).partition(" ")[2], []).append(right.verb)
        together: dict[str, list[str]] = {}
        for resource, found in verbs.items():
            together.setdefault(" ".join(found), []).append(resource)
        rights = "; ".join(f"{found} {', '.join(names)}" for found, names in together.items())
        rows.append(
            f"| {need.commands} | {rights} | {need.workload or '-'} | "
            f"{need.without or 'they cannot run'} | {need.role} |"
        )
    return "\n".join(rows)


def controller_template() -> str:
    """Text of the chart's `_controller.tpl`: a named list of rules for each of these tables."""
    tables: dict[str, Iterable[Right]] = {
        "jobs": controller_rbac.JOBS,
        "nodes": controller_rbac.NODES,
        "nodeLeases": controller_rbac.NODE_LEASES,
        "election": controller_rbac.ELECTION,
    }
    parts = [
        "{{/* Made from the table of rights in controller/kdist_controller/rbac.py: python -m "
        "tests.charts.rights_files */}}\n"
    ]
    for name, rights in tables.items():
        parts.append(define_rules(f"controller.{name}", to_rules(rights)))
    return "".join(parts)
