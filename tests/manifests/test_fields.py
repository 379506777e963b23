"""Every field of job.yaml reaches an object, and `--annotate` names the field that a line really
comes from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from kdist import backends
from kdist.manifest import Manifest
from kdist.spec import reference
from tests.manifests.jobs import FULL, full, load, place

Path = tuple[str | int, ...]

# What else each field may be; a field that is not here is a number, and gets one more.
OTHER: dict[str, Any] = {
    "spec.image": "another/image:2",
    "spec.procsPerNode": 1,
    "spec.memorySnapshot": "off",
    "spec.compileCache": "/other",
    "spec.resources.cpu": "4",
    "spec.resources.memory": "9Gi",
    "spec.data[].claim": "others",
    "spec.data[].mountPath": "/data/others",
    "spec.data[].url": "s3://team-data/texts",
    "spec.data[].endpoint": "https://minio.example.com:7000",
    "spec.data[].region": "eu-west-1",
    "spec.data[].secret": "other",
    "spec.data[].size": "1Gi",
    "spec.data[].sha256": "fedcba9876543210" * 4,
    "spec.checkpoints.size": "11Gi",
    "spec.checkpoints.class": "slow",
    "spec.checkpoints.accessMode": "ReadWriteMany",
    "spec.checkpoints.reclaimPolicy": "Delete",
    "spec.env[].name": "MODUS",
    "spec.env[].value": "slow",
    "spec.env[].secret.name": "others",
    "spec.env[].secret.key": "other",
    "spec.queue": "team-b",
    "spec.nodeSelector": {"disk": "hdd"},
    "spec.tolerations[].key": "other",
    "spec.tolerations[].value": "no",
    "spec.tolerations[].effect": "NoSchedule",
    "spec.imagePullSecrets": ["other"],
    "spec.priorityClass": "low",
    "spec.preflight.allReduce.minBusBandwidth": "5G",
    "spec.preflight.allReduce.size": "1Gi",
    "spec.preflight.command": ["/opt/checks/other.sh"],
    "spec.restart.rules[].action": "Count",
    "spec.restart.rules[].onErrors": ["ValueError"],
    "spec.logs.keep": "2Gi",
    "spec.podTemplate": {"spec": {"schedulerName": "volcano"}},
    "metadata.namespace": "dl",
    "metadata.labels": {"team": "speech"},
    "metadata.annotations": {"note": "other"},
    "metadata.name": "whole",
}
# Fields whose use is somewhere else, and where.
ELSEWHERE = {
    "apiVersion": "there is one",
    "kind": "there is one",
    "spec.backend": "it chooses the template",
    "spec.rendezvous": "the placement says what it became",
    "spec.code": "its files are in the placement",
    "spec.code.path": "it is what spec.code is",
    "spec.code.configMap": "it excludes a folder; test_code has it",
    "spec.code.claim": "it excludes a folder; test_code has it",
    "spec.code.subPath": "it needs claim; test_code has it",
    **{
        f"spec.install.{name}": "its archive is no text; test_install has it"
        for name in ("packages", "index", "size", "lock", "cache.claim", "cache.hostPath")
    },
    **{
        f"spec.install.wheels.{name}": "its archive is no text; test_install has it"
        for name in (*("claim", "path", "url", "endpoint", "region", "secret", "size", "sha256"),)
    },
    **{
        f"spec.code.{name}": "it excludes a folder; test_hostile and test_code have it"
        for name in ("url", "endpoint", "region", "secret", "size", "sha256")
    },
    "spec.code.items[].key": "it needs configMap; test_commands of the controller has it",
    "spec.code.items[].path": "it needs configMap; test_commands of the controller has it",
    "spec.replicas": "it takes the place of nodes.max; test_workloads has it",
    "spec.suspend": "the placement says what it became",
    "spec.restartedAt": "the controller makes the pods again",
    "spec.data[].path": "it is for kdist run",
    "spec.data[].access": "it is for a claim; test_install has it",
    "spec.checkpoints.path": "it is for kdist run, and excludes size",
    "spec.checkpoints.claim": "it excludes size; test_pods has it",
    "spec.checkpoints.url": "it excludes size; test_bucket has it",
    "spec.checkpoints.endpoint": "it needs url; test_bucket has it",
    "spec.checkpoints.region": "it needs url; test_bucket has it",
    "spec.checkpoints.secret": "it needs url; test_bucket has it",
    "spec.serviceAccountName": "without it the job makes one; test_permissions has it",
    "spec.tolerations[].operator": "Exists excludes a value",
    "spec.restart.rules[].onExitCodes.operator": "it is for script; test_restart_rules has it",
    "spec.restart.rules[].onExitCodes.values": "it is for script; test_restart_rules has it",
    "spec.script": "it excludes train",
}
SECTIONS = ("spec.train.", "spec.script.", "spec.podTemplate.", "spec.train", "spec")


def find_leaves() -> Iterator[str]:
    """The fields that hold a value themselves, by the model; what the trainer alone reads counts as
    one.
    """
    for field in reference.root().walk():
        if field.path.startswith(SECTIONS[:3]) or (field.children and field.path != "spec.nodes"):
            continue
        if field.item is not None and (field.item.children or field.item.item is not None):
            continue
        if field.item is None or not field.item.children:
            yield field.path


LEAVES = [
    path
    for path in dict.fromkeys(find_leaves())
    if path not in ELSEWHERE and path not in SECTIONS and path != "spec.nodes"
]


def find_place(document: Any, dotted: str) -> tuple[Any, str | int]:
    """The container of a field in the full job, and its key; of several list items the last that
    has it.
    """
    parts = dotted.replace("[]", ".[]").split(".")
    for part in parts[:-1]:
        document = document[-1] if part == "[]" else document[part]
        if isinstance(document, list) and parts[-1] != "[]":
            document = [next(each for each in reversed(document) if _has(each, parts[-1], parts))]
    return (document, 0) if parts[-1] == "[]" else (document, parts[-1])


def _has(item: Any, last: str, parts: list[str]) -> bool:
    return last in item or any(part in item for part in parts[parts.index("[]") + 1 :])


@cache
def base(backend: str) -> list[Manifest]:
    return place(load(FULL), backend)


def change(path: str) -> dict[str, Any]:
    document = full()
    container, key = find_place(document, path)
    container[key] = OTHER[path] if path in OTHER else container[key] + 1
    return document


def find_values(manifests: list[Manifest]) -> dict[tuple[str, str, Path], Any]:
    """Every leaf of every object but `job.json`, which holds the whole file as it is."""
    return {
        (each.kind, each.name, path): value
        for each in manifests
        for path, value in walk(each.document)
        if path[-1] != "job.json"
    }


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if not items:
        yield path, value
        return
    for key, item in items:
        yield from walk(item, (*path, key))


def test_the_full_job_says_something_in_every_field() -> None:
    for path in LEAVES:
        container, key = find_place(full(), path)
        assert container[key] is not None, path
    assert load(FULL)


@pytest.mark.parametrize("path", [path for path in LEAVES if path != "metadata.name"])
def test_a_field_changes_what_is_rendered_and_the_changed_lines_name_it(path: str) -> None:
    changed = 0
    for backend in backends.NAMES:
        before, after = base(backend), place(load(change(path)), backend)
        old, new = find_values(before), find_values(after)
        sources = {
            (each.kind, each.name, at): source
            for each in after
            for at, source in each.sources.items()
        }
        for place_, value in new.items():
            if place_ in old and old[place_] != value:
                changed += 1
                source = re.sub(r"\[\d+\]", "", sources.get(place_, ""))
                assert source, f"{path} changes {place_}, which names no field"
                plain = path.replace("[]", "")
                assert plain.startswith(source) or source.startswith(plain), (
                    f"{path} changes {place_}, which names {source}"
                )
        changed += len(old.keys() ^ new.keys())
    assert changed


@pytest.mark.parametrize("backend", backends.NAMES)
def test_every_object_of_another_name_is_another_object(backend: str) -> None:
    before = {each.identity for each in place(load(FULL), backend)}
    after = {each.identity for each in place(load(change("metadata.name")), backend)}
    assert not before & after


def test_a_field_of_which_nothing_is_rendered_has_its_reason() -> None:
    known = {field.path for field in reference.root().walk()}
    assert set(ELSEWHERE) <= known
