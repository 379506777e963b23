"""Which kinds a cluster serves."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from kdist.cluster.refusal import RefusalError
from kdist.cluster.transport import Request, Transport
from kdist.errors import KdistError

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
            found |= {
                (version, each["kind"]) for each in _list_resources(transport, f"{root}/{version}") if "/" not in each["name"]
            }
    return found


def _list_resources(transport: Transport, path: str) -> list[dict[str, Any]]:
    """What a group serves; nothing of one whose own server (metrics-server, say) is away, which is no matter to any other."""
    try:
        return _ask(transport, path, again=False).get("resources") or []
    except RefusalError as error:
        if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE):
            raise
        return []
    except KdistError:  # the connection was cut
        return _ask(transport, path).get("resources") or []


def _of_group(name: str, group: dict[str, Any]) -> set[tuple[str, str]]:
    found = set()
    for version in group.get("versions") or []:
        api_version = f"{name}/{version['version']}" if name else version["version"]
        for resource in version.get("resources") or []:
            kind = (resource.get("responseKind") or {}).get("kind")
            if kind:
                found.add((api_version, kind))
    return found


def _ask(transport: Transport, path: str, *, accept: str = "application/json", again: bool = True) -> dict[str, Any]:
    return transport.send(Request("GET", path, f"get {path}", accept=accept, again=again)).document()
