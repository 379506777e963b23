"""Which kinds a cluster serves."""

from __future__ import annotations

from typing import Any

from kdist.cluster.transport import Request, Transport

_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def kinds(transport: Transport) -> set[tuple[str, str]]:
    """Every (API version, kind), by two requests where the server answers for all groups at once (1.30), else by one each."""
    found: set[tuple[str, str]] = set()
    for root in ("/api", "/apis"):
        answer = _ask(transport, root, accept=f"{_AGGREGATED},application/json")
        if "items" in answer:
            for group in answer["items"]:
                found |= _of_group((group.get("metadata") or {}).get("name") or "", group)
            continue
        versions = answer.get("versions") or [
            version["groupVersion"] for group in answer.get("groups") or [] for version in group.get("versions") or []
        ]
        for version in versions:
            listed = _ask(transport, f"{root}/{version}").get("resources") or []
            found |= {(version, each["kind"]) for each in listed if "/" not in each["name"]}
    return found


def _of_group(name: str, group: dict[str, Any]) -> set[tuple[str, str]]:
    found = set()
    for version in group.get("versions") or []:
        api_version = f"{name}/{version['version']}" if name else version["version"]
        for resource in version.get("resources") or []:
            kind = (resource.get("responseKind") or {}).get("kind")
            if kind:
                found.add((api_version, kind))
    return found


def _ask(transport: Transport, path: str, *, accept: str = "application/json") -> dict[str, Any]:
    return transport.send(Request("GET", path, f"get {path}", accept=accept)).document()
