"""A small Kubernetes in the memory of a test, behind a real HTTP server: objects with versions and
watches, server-side apply, deletion with the garbage collector, and controllers that make the pods
of Jobs and StatefulSets.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from operator import itemgetter
from typing import Any, NamedTuple

from kdist.backends import DEPENDENT_KINDS, workload_kinds
from kdist.cluster.resources import plural
from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.cluster.objects import merge_patch

Document = dict[str, Any]

KUEUE_KIND = ("kueue.x-k8s.io/v1beta1", "Workload")
KINDS = (
    *DEPENDENT_KINDS,
    *workload_kinds(),
    ("v1", "Pod"),
    ("v1", "Event"),
    ("v1", "Node"),
    ("apps/v1", "Deployment"),
    ("batch/v1", "CronJob"),
    ("kdist.dev/v1alpha1", "TrainingJob"),
    ("coordination.k8s.io/v1", "Lease"),
    KUEUE_KIND,
)
OPERATORS = ("JobSet", "PyTorchJob", "TrainJob", "Workload")
"""Kinds that not every cluster has."""
_WATCH_SECONDS = 5.0
_EVENTS_KEPT = 500
"""How many events there are at most; an API server removes them after an hour."""


class _Place(NamedTuple):
    """Where an object is, or all of a kind if it has no name."""

    api_version: str
    plural: str
    namespace: str
    name: str = ""


class Kubernetes:
    """Answers an `Api` as an API server does.

    Attributes:
        objects: all objects, by their place.
        reports: what the agents answer on `/status`, by pod.
        writes: every change that was asked for, as (method, kind, name).
    """

    def __init__(self, *, absent: tuple[str, ...] = OPERATORS) -> None:
        self.objects: dict[_Place, Document] = {}
        self.reports: dict[str, Document] = {}
        self.writes: list[tuple[str, str, str]] = []
        self._kinds = {
            (api_version, plural(kind)): kind for api_version, kind in KINDS if kind not in absent
        }
        self._applied: dict[tuple[_Place, str], Document] = {}
        self._history: list[tuple[int, str, _Place, Document]] = []
        self._versions = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())

    def __call__(self, asked: Asked) -> Reply:
        if asked.path in ("/api", "/apis"):
            return Reply(document=self._discover(asked.path))
        if asked.path.count("/") == 3 and asked.path.startswith("/apis/"):
            return self._discover_version(asked.path.removeprefix("/apis/"))
        if asked.path.endswith("selfsubjectrulesreviews"):
            return Reply(201, {"status": {"resourceRules": []}})
        if asked.path.endswith("selfsubjectaccessreviews"):
            return Reply(201, {"status": {"allowed": True}})
        place, subresource = _locate(asked.path)
        if subresource.startswith("proxy"):
            report = self.reports.get(place.name.partition(":")[0])
            return Reply(document=report) if report else refusal(503, "no agent")
        if (place.api_version, place.plural) not in self._kinds:
            return refusal(404, "the server could not find the requested resource", "NotFound")
        if "watch" in asked.query:
            return Reply(lines=self._watch(place, asked))
        if asked.method == "GET":
            return self._read(place, asked)
        kind = self._kinds[place.api_version, place.plural]
        with self._changed:
            name = place.name or asked.body["metadata"]["name"]
            self.writes.append((asked.method, kind, name))
            return self._write(place, subresource, asked)

    def _discover(self, root: str) -> Document:
        groups: dict[str, list[Document]] = {}
        for api_version, kind in ((key[0], kind) for key, kind in self._kinds.items()):
            group, _, version = api_version.rpartition("/")
            if bool(group) == (root == "/apis"):
                resource = {"resources": [{"responseKind": {"kind": kind}}], "version": version}
                groups.setdefault(group, []).append(resource)
        return {
            "items": [
                {"metadata": {"name": group}, "versions": versions}
                for group, versions in groups.items()
            ]
        }

    def _discover_version(self, api_version: str) -> Reply:
        found = [
            (many, kind) for (version, many), kind in self._kinds.items() if version == api_version
        ]
        if not found:
            return refusal(404, "the server could not find the requested resource", "NotFound")
        return Reply(document={"resources": [{"name": many, "kind": kind} for many, kind in found]})

    def _read(self, place: _Place, asked: Asked) -> Reply:
        with self._changed:
            if place.name:
                found = self.objects.get(place)
                return Reply(document=copy.deepcopy(found)) if found else _missing(place)
            items = [
                copy.deepcopy(each)
                for where, each in self.objects.items()
                if _matches(where, each, place, asked.query.get("labelSelector", ""))
            ]
            version = str(next(self._versions))
        return Reply(document={"metadata": {"resourceVersion": version}, "items": items})

    def _watch(self, place: _Place, asked: Asked) -> Iterator[str]:
        seen = int(asked.query["resourceVersion"])
        selector = asked.query.get("labelSelector", "")
        while True:
            with self._changed:
                self._changed.wait_for(partial(self._has_news, seen), _WATCH_SECONDS)
                news = self._history[bisect_right(self._history, seen, key=itemgetter(0)) :]
            if not news:
                return
            for version, change, where, document in news:
                seen = version
                if _matches(where, document, place, selector):
                    yield json.dumps({"type": change, "object": document})

    def _has_news(self, seen: int) -> bool:
        return bool(self._history) and self._history[-1][0] > seen

    def _write(self, place: _Place, subresource: str, asked: Asked) -> Reply:
        if asked.method == "POST":
            where = place._replace(name=asked.body["metadata"]["name"])
            if "dryRun" in asked.query:
                return Reply(201, asked.body)
            if where in self.objects:
                return refusal(409, f'"{where.name}" already exists', "AlreadyExists")
            return Reply(201, self._store(where, copy.deepcopy(asked.body)))
        found = self.objects.get(place)
        wanted = asked.body.get("preconditions") or asked.body.get("metadata") or {}
        if found is not None and _differs(wanted, found):
            return refusal(409, f'"{place.name}" has changed', "Conflict")
        if asked.method == "DELETE":
            if found is None:
                return _missing(place)
            if asked.body.get("dryRun"):
                return Reply(document={})
            self.delete(place)
            return Reply(document={})
        if "apply-patch" in asked.headers.get("content-type", ""):
            return self._apply(place, asked, found)
        if found is None:
            return _missing(place)
        body = asked.body if not subresource else {subresource: asked.body.get(subresource)}
        if "dryRun" in asked.query:
            return Reply(document=merge_patch(found, body))
        return Reply(document=self._store(place, merge_patch(found, body)))

    def _apply(self, place: _Place, asked: Asked, found: Document | None) -> Reply:
        manager = asked.query["fieldManager"]
        body = copy.deepcopy(asked.body)
        for key in ("resourceVersion", "uid"):
            body["metadata"].pop(key, None)
        before = self._applied.get((place, manager), {})
        kept = _without(found or {}, before, body)
        if found and found["kind"] == "TrainingRuntime" and merge_patch(kept, body) != found:
            text = "spec.template.spec.failurePolicy: Invalid value: Value is immutable"
            return refusal(422, text, "Invalid")
        if "dryRun" in asked.query:
            return Reply(200 if found else 201, merge_patch(kept, body))
        self._applied[place, manager] = body
        return Reply(200 if found else 201, self._store(place, merge_patch(kept, body)))

    def _store(self, place: _Place, document: Document) -> Document:
        before = self.objects.get(place)
        metadata = document.setdefault("metadata", {})
        if before is not None and _is_same(before, document):
            return copy.deepcopy(before)
        metadata["namespace"], metadata["name"] = place.namespace, place.name
        metadata.setdefault("uid", f"uid-{place.namespace}-{place.name}-{next(self._versions)}")
        changed = before is None or before.get("spec") != document.get("spec")
        metadata["generation"] = metadata.get("generation", 0) + int(changed)
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        document["apiVersion"] = place.api_version
        document["kind"] = self._kinds[place.api_version, place.plural]
        self._note("ADDED" if before is None else "MODIFIED", place, document)
        self.objects[place] = document
        if document["kind"] == "Event":
            self._expire_events()
        self._control(place, document)
        return copy.deepcopy(self.objects.get(place, document))

    def _note(self, change: str, place: _Place, document: Document) -> None:
        version = next(self._versions)
        document["metadata"]["resourceVersion"] = str(version)
        self._history.append((version, change, place, copy.deepcopy(document)))
        self._changed.notify_all()

    def _expire_events(self) -> None:
        """Remove the oldest events that are too many."""
        events = [place for place, each in self.objects.items() if each["kind"] == "Event"]
        for place in events[:-_EVENTS_KEPT]:
            self._note("DELETED", place, self.objects.pop(place))

    def delete(self, place: _Place) -> None:
        """Delete an object, and all objects that nobody owns then."""
        with self._changed:
            gone = self.objects.pop(place)
            self._applied = {key: each for key, each in self._applied.items() if key[0] != place}
            self._note("DELETED", place, gone)
            uids = {each["metadata"]["uid"] for each in self.objects.values()}
            for where, each in list(self.objects.items()):
                owners = each["metadata"].get("ownerReferences") or []
                orphaned = owners and not any(owner["uid"] in uids for owner in owners)
                if orphaned and where in self.objects:
                    self.delete(where)

    def _control(self, place: _Place, document: Document) -> None:
        """Make the pods of a workload, as many as it wants."""
        kind, spec = document["kind"], document.get("spec") or {}
        if kind not in ("Job", "StatefulSet"):
            return
        ended = any(each["type"] == "Complete" for each in _conditions(document))
        wanted = spec.get("parallelism" if kind == "Job" else "replicas", 0)
        wanted = 0 if spec.get("suspend") else wanted
        for number in itertools.count():
            pod = _Place("v1", "pods", place.namespace, f"{place.name}-{number}")
            if number < wanted and not ended and pod not in self.objects:
                self._store(pod, _make_pod(document, number))
            elif number >= wanted and pod in self.objects:
                self.delete(pod)
            elif number >= wanted:
                break
        status = document.get("status") or {}
        fresh = {"observedGeneration": document["metadata"]["generation"]}
        if kind == "StatefulSet":
            fresh |= {"replicas": wanted, "currentRevision": "1", "updateRevision": "1"}
        elif not ended:
            fresh |= {"active": wanted, "ready": wanted}
        if {**status, **fresh} != status:
            document["status"] = {**status, **fresh}
            self._note("MODIFIED", place, document)

    def list_all(self) -> dict[str, list[Document]]:
        """Copies of all objects, by their kind."""
        found: dict[str, list[Document]] = {kind: [] for kind in self._kinds.values()}
        with self._changed:
            for each in self.objects.values():
                found[each["kind"]].append(copy.deepcopy(each))
        return found

    def clear(self) -> None:
        """Begin again, without objects."""
        with self._changed:
            for found in (self.objects, self._applied, self._history, self.writes):
                found.clear()
            self._versions = itertools.count(1)

    def find(self, kind: str, name: str, namespace: str = "ml") -> Document | None:
        """A copy of an object; None if there is none."""
        with self._changed:
            found = self.objects.get(self.place(kind, name, namespace))
            return copy.deepcopy(found)

    def place(self, kind: str, name: str, namespace: str = "ml") -> _Place:
        """Where an object of this kind is."""
        api_version = next(key[0] for key, each in self._kinds.items() if each == kind)
        return _Place(api_version, plural(kind), namespace, name)

    def names(self, namespace: str = "ml") -> set[tuple[str, str]]:
        """(Kind, name) of every object in a namespace but events and leases."""
        with self._changed:
            return {
                (each["kind"], where.name)
                for where, each in self.objects.items()
                if where.namespace == namespace and each["kind"] not in ("Event", "Lease")
            }

    def at_once(self) -> threading.Condition:
        """Held while several changes are made, so that nobody asks between them."""
        return self._changed

    def put(self, kind: str, document: Document, namespace: str = "ml") -> Document:
        """Create an object, or change it by a merge patch, as somebody else does."""
        place = self.place(kind, document["metadata"]["name"], namespace)
        with self._changed:
            return self._store(place, merge_patch(self.objects.get(place) or {}, document))

    def remove(self, kind: str, name: str, namespace: str = "ml") -> None:
        """Delete an object, as somebody else does."""
        self.delete(self.place(kind, name, namespace))


def _locate(path: str) -> tuple[_Place, str]:
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        api_version, rest = parts[1], parts[2:]
    else:
        api_version, rest = "/".join(parts[1:3]), parts[3:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name = (*rest[:2], "", "")[:2]  # none in what asks another server by mistake
    return _Place(api_version, plural, namespace, name), "/".join(rest[2:])


def _matches(where: _Place, document: Document, place: _Place, selector: str) -> bool:
    labels = document["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        key, equals, value = part.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return (where.api_version, where.plural) == (place.api_version, place.plural) and (
        place.namespace in ("", where.namespace)
    )


def _differs(wanted: Mapping[str, Any], found: Document) -> bool:
    return any(
        wanted.get(key) not in (None, found["metadata"].get(key))
        for key in ("uid", "resourceVersion")
    )


def _is_same(before: Document, after: Document) -> bool:
    ignored = ("resourceVersion", "generation")
    one, other = copy.deepcopy(before), copy.deepcopy(after)
    for each in (one, other):
        for key in ignored:
            each["metadata"].pop(key, None)
    return one == other


def _without(found: Any, before: Any, after: Any) -> Any:
    """`found` without what the same manager has applied before and applies no longer."""
    if not isinstance(found, dict) or not isinstance(before, dict) or not isinstance(after, dict):
        return found
    return {
        key: _without(value, before.get(key), after.get(key))
        for key, value in found.items()
        if key not in before or key in after
    }


def _missing(place: _Place) -> Reply:
    return refusal(HTTPStatus.NOT_FOUND, f'"{place.name}" not found', "NotFound", name=place.name)


def _conditions(document: Document) -> list[Document]:
    return (document.get("status") or {}).get("conditions") or []


def _make_pod(workload: Document, number: int) -> Document:
    template = copy.deepcopy(workload["spec"]["template"])
    owner = {key: workload[key] for key in ("apiVersion", "kind")}
    owner |= {key: workload["metadata"][key] for key in ("name", "uid")} | {"controller": True}
    container = template["spec"]["containers"][0]["name"]
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    metadata = {
        **(template.get("metadata") or {}),
        "name": f"{workload['metadata']['name']}-{number}",
        "ownerReferences": [owner],
    }
    return {
        "metadata": metadata,
        "spec": {"nodeName": f"node-{number}", **template["spec"]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "containerStatuses": [
                {"name": container, "ready": True, "restartCount": 0, "state": state}
            ],
        },
    }
