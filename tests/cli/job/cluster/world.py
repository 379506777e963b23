"""A namespace with one job, served over HTTP: its objects, its agents' words and its logs may
change while it is looked at.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.status.objects import Document, config_map, pod, report, workload

_PLACE = "/api/v1/namespaces/ml"
_JOB = "/apis/batch/v1/namespaces/ml/jobs/digits"
FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"


class World:
    """Answers as an API server would. `logs` holds (stamped lines, lines of the container before)
    by pod, of another container than the training's by `POD/CONTAINER`.
    """

    def __init__(self) -> None:
        self.config_map: Document | None = config_map()
        self.others: list[Document] = []
        self.workload: Document | None = workload(parallelism=2)
        self.pods: list[Document] = [pod(0), pod(1)]
        self.events: list[Document] = []
        self.reports: dict[str, Document] = {FIRST: report(), SECOND: report(ranks=(1,))}
        self.logs: dict[str, list[str]] = {}
        self.before: dict[str, list[str]] = {}
        self.deployments: list[Document] = []
        self.forbidden: set[str] = set()
        self.patches: list[Document] = []

    def __call__(self, asked: Asked) -> Reply:
        if any(word in asked.path for word in self.forbidden):
            return refusal(403, 'User "jo" cannot list resource', "Forbidden")
        if asked.method == "PATCH":
            self.patches.append(asked.body)
            return Reply(document={})
        if "watch" in asked.query:
            return Reply(lines=self._watched(int(asked.query["resourceVersion"])))
        if asked.path.startswith(f"{_PLACE}/pods"):
            return self._answer_pods(asked)
        single = {f"{_PLACE}/configmaps/digits": self.config_map, _JOB: self.workload}
        if asked.path in single:
            found = single[asked.path]
            return (
                Reply(document=found)
                if found
                else refusal(404, "not found", "NotFound", name="digits")
            )
        lists: dict[str, list[Any]] = {
            f"{_PLACE}/events": self._stored_events(),
            "/apis/apps/v1/deployments": self.deployments,
            f"{_PLACE}/configmaps": [self.config_map, *self.others],
            _JOB.rpartition("/")[0]: [self.workload],
        }
        if asked.path in lists:
            items = [each for each in lists[asked.path] if each]
            if "PartialObjectMetadataList" in asked.headers["accept"]:
                items = [{"metadata": each["metadata"]} for each in items]
            return Reply(
                document={"metadata": {"resourceVersion": str(len(self.events))}, "items": items}
            )
        return refusal(404, "not found", "NotFound", name=asked.path.rpartition("/")[2])

    def _stored_events(self) -> list[Document]:
        """The events with what a server adds to them."""
        ids = (
            {"name": f"event-{place}", "uid": str(place), "resourceVersion": str(place)}
            for place in itertools.count(1)
        )
        return [
            {**document, "metadata": metadata}
            for document, metadata in zip(self.events, ids, strict=False)
        ]

    def _watched(self, seen: int) -> Iterator[str]:
        """A second's watch of events: each one that is added, as soon as it is there."""
        end = time.monotonic() + 1
        while time.monotonic() < end:
            events = self._stored_events()
            for document in events[seen:]:
                yield json.dumps({"type": "ADDED", "object": document})
            seen = len(events)
            time.sleep(0.01)

    def _answer_pods(self, asked: Asked) -> Reply:
        name, _, rest = asked.path.removeprefix(f"{_PLACE}/pods").lstrip("/").partition("/")
        if not name:
            return Reply(document={"items": self.pods})
        if rest == "log":
            return self._answer_log(name, asked)
        if rest.startswith("proxy"):
            printed = self.reports.get(name.partition(":")[0])
            return (
                Reply(document=printed)
                if printed
                else refusal(503, "error trying to reach service: connection refused")
            )
        found = next((each for each in self.pods if each["metadata"]["name"] == name), None)
        return (
            Reply(document=found)
            if found
            else refusal(404, f'pods "{name}" not found', "NotFound", name=name)
        )

    def _answer_log(self, name: str, asked: Asked) -> Reply:
        if all(each["metadata"]["name"] != name for each in self.pods):
            return refusal(404, f'pods "{name}" not found', "NotFound", name=name)
        container = asked.query.get("container", "trainer")
        key = name if container == "trainer" else f"{name}/{container}"
        lines = (self.before if asked.query.get("previous") else self.logs).get(key)
        if lines is None:
            return refusal(400, "container is waiting to start: ContainerCreating", "BadRequest")
        lines = [line for line in lines if line.split()[0] >= asked.query.get("sinceTime", "")]
        if asked.query.get("timestamps") != "true":
            lines = [line.partition(" ")[2] for line in lines]
        return Reply(
            lines=lines[-int(asked.query["tailLines"]) :] if "tailLines" in asked.query else lines
        )


def lines(*texts: str, at: int = 0) -> list[str]:
    """These lines with stamps, a second after the other, from second `at`."""
    return [
        f"2026-01-31T12:00:{at + index:02}.000000000Z {text}" for index, text in enumerate(texts)
    ]


def changed(document: Document, **status: Any) -> Document:
    """The object with parts of its status replaced."""
    return {**document, "status": {**document["status"], **status}}
