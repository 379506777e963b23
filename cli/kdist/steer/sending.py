"""Rendering a job anew from what the cluster holds, and sending what has changed."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kdist import render
from kdist.errors import KdistError, NotFoundError
from kdist.manifest import Manifest
from kdist.steer.target import Target


def render_anew(target: Target, *, suspended: bool = False, workload: Mapping[str, Any] | None = None) -> list[Manifest]:
    """All objects of the target's job; the files of `spec.code` are those that the `workload` mounts."""
    code = read_code(target, workload or {}) if target.job.spec.code is not None else None
    return render.render(target.job, replace(target.placement, suspended=suspended, code=code))


def read_code(target: Target, workload: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of `spec.code` by their path, from the ConfigMap that holds them. Raises `KdistError` where it is gone."""
    prefix = f"{target.name}-code-"
    for volume in _find_all(workload, "configMap"):
        if str(volume.get("name", "")).startswith(prefix):
            return _read_files(target, volume)
    raise KdistError(
        f"the code of {target.name} is not in the cluster any more", next_command="kdist apply with the job file sends it again"
    )


def _read_files(target: Target, volume: Mapping[str, Any]) -> dict[str, bytes]:
    try:
        found = target.cluster.get("v1", "ConfigMap", volume["name"])
    except NotFoundError as error:
        raise KdistError(f"ConfigMap {volume['name']} with the code of {target.name} is gone") from error
    text, binary = found.get("data") or {}, found.get("binaryData") or {}
    files = {}
    for item in volume.get("items") or []:
        key = item["key"]
        files[item["path"]] = text[key].encode() if key in text else b64decode(binary.get(key, ""))
    return files


def _find_all(document: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every object that stands under `key`, wherever in the document."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            if name == key and isinstance(value, Mapping):
                yield value
            yield from _find_all(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _find_all(value, key)


def is_workload(target: Target, manifest: Manifest) -> bool:
    """Whether this is the object that makes the pods."""
    return (manifest.kind, manifest.name) == (target.backend.kind, target.name)


def send(target: Target, manifests: Iterable[Manifest], *, dry_run: bool = False) -> None:
    """Send objects by server-side apply, in their order."""
    for manifest in manifests:
        target.cluster.apply(manifest, dry_run=dry_run)
