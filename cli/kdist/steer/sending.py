"""Rendering a job anew from what the cluster holds, and sending what has changed."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kdist import deploy, render
from kdist.errors import KdistError, NotFoundError
from kdist.manifest import Manifest
from kdist.steer.target import Target


def render_anew(target: Target, *, suspended: bool = False) -> list[Manifest]:
    """All objects of the target's job; the files of `spec.code` are those that it was sent with last."""
    code = read_code(target) if target.job.spec.code is not None else None
    rendered = render.render(target.job, replace(target.placement, suspended=suspended, code=code))
    # The code that was read back is there already, and its ConfigMap is immutable.
    return [one for one in rendered if not (one.kind == "ConfigMap" and one.name.startswith(f"{target.name}-code-"))]


def fit(target: Target, manifests: Iterable[Manifest], workload: Mapping[str, Any]) -> list[Manifest]:
    """The same objects for a job that is at work: what its workload cannot change, and what its agents were told, stays.

    The ConfigMap with its `train.json` is the one that it has: this kdist may be of another version, and know other fields.
    """
    told = f"{target.name}-train-"
    has = {str(each["name"]) for each in _find_all(workload, "configMap") if str(each.get("name")).startswith(told)}
    found = []
    for one in manifests:
        document = one.document
        if is_workload(target, one):
            document = target.backend.keep(document, workload)
            if len(has) == 1:
                document = json.loads(re.sub(rf'"{told}[0-9a-f]+"', f'"{has.copy().pop()}"', json.dumps(document)))
        elif one.kind == "ConfigMap" and one.name.startswith(told):
            continue
        found.append(Manifest(document))
    return found


def read_code(target: Target) -> dict[str, bytes]:
    """The files of `spec.code` by their path, from the ConfigMap that holds them. Raises `KdistError` where it is gone."""
    try:
        return _read_files(target, json.loads(target.config_map["data"]["code.json"]))
    except (KeyError, ValueError) as error:
        raise KdistError(
            f"ConfigMap {target.name} does not say where the code of {target.name} is",
            next_command="kdist apply with the job file sends it again",
        ) from error


def _read_files(target: Target, volume: Mapping[str, Any]) -> dict[str, bytes]:
    try:
        found = target.cluster.get("v1", "ConfigMap", volume["name"])
    except NotFoundError as error:
        raise KdistError(
            f"ConfigMap {volume['name']} with the code of {target.name} is gone",
            next_command="kdist apply with the job file sends it again",
        ) from error
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
    """Send objects by server-side apply, in their order; what the server refuses leaves no half of them behind."""
    known = dict(target.config_map)
    plan = deploy.Plan(target.job, target.placement, list(manifests), [], known)
    for _ in deploy.send(target.cluster, plan, dry_run=dry_run):
        pass
