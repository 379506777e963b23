"""The rights of the controller, as the chart gives them: a server in front of a small Kubernetes
answers 403 to every other request of its service account.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from kdist.recovery.decision import LEASE_NAMESPACE
from tests.charts.rights_files import CONTROLLER
from tests.cli.cluster.api import Answer, Asked, Reply, refusal

TOKEN = "of-the-controller"  # noqa: S105 - of a server in the test
_PATH = re.compile(
    r"/api(?:s/(?P<group>[^/]+))?/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?P<part>/\w+)?)?(?:/.*)?"
)
_VERBS = {
    "GET": "get",
    "POST": "create",
    "PATCH": "patch",
    "PUT": "update",
    "DELETE": "delete",
}
_FOR_EVERYBODY = "authorization.k8s.io"
_TABLE = re.compile(r'define "kdist\.rules\.controller\.(\w+)" -\}\}\n(.*?)\{\{- end', re.DOTALL)


class RightsServer:
    """Refuses what the controller may not do, and keeps a list of it; others may do everything."""

    def __init__(self, answer: Answer) -> None:
        self.refused: list[str] = []
        self._answer = answer
        self._given = dict(_read_chart())

    def __call__(self, asked: Asked) -> Reply:
        right = right_of(asked)
        if asked.headers.get("authorization") != f"Bearer {TOKEN}" or right is None:
            return self._answer(asked)
        tables = ["jobs", "nodes"]
        if right[2] == "leases":
            tables = ["nodeLeases" if f"/{LEASE_NAMESPACE}/" in asked.path else "election"]
        if any(right in self._given[each] for each in tables):
            return self._answer(asked)
        words = f"{right[0]} {right[2]}.{right[1]}".rstrip(".")
        self.refused.append(f"{words} ({asked.method} {asked.path})")
        return refusal(403, f'User "kdist-controller" cannot {words}', "Forbidden")


def right_of(asked: Asked) -> tuple[str, str, str] | None:
    """The verb, group and resource of a request; None for what everybody may."""
    found = _PATH.fullmatch(asked.path)
    if found is None or found["group"] == _FOR_EVERYBODY or found["part"] == "/proxy":
        return None  # an agent is asked over its pod's address in a cluster
    verb = _VERBS[asked.method]
    if not found["name"] and verb in ("get", "delete"):
        reads = "watch" if "watch" in asked.query else "list"
        verb = reads if verb == "get" else "deletecollection"
    return verb, found["group"] or "", f"{found['resource']}{found['part'] or ''}"


def _read_chart() -> Iterator[tuple[str, set[tuple[str, str, str]]]]:
    """What each of the named lists of rules in the chart gives."""
    for name, text in _TABLE.findall(CONTROLLER.read_text()):
        rules: list[dict[str, Any]] = yaml.safe_load(text)
        yield (
            name,
            {
                (verb, group, resource)
                for rule in rules
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            },
        )
