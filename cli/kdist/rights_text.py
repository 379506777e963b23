"""The table of rights as text: for the chart's roles, and for the documentation."""

from __future__ import annotations

from kdist.rbac import NEEDS, define_rules, rules


def chart_templates() -> str:
    """Text of the chart's `_rules.tpl`: named lists of rules, without and with the workloads."""
    parts = [
        "{{/* Made from the table of rights in cli/kdist/rbac.py: python -m "
        "tests.charts.rights_files */}}\n"
    ]
    for role in ("view", "edit"):
        for name in ("objects", "workloads"):
            found = rules(role, workloads=name == "workloads")
            parts.append(define_rules(f"{role}.{name}", found))
    return "".join(parts)


def table() -> str:
    """The table of rights as Markdown."""
    rows = [
        "| commands | verbs and resources | on the workload | without it | role |",
        "|---|---|---|---|---|",
    ]
    for need in NEEDS:
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
