"""A cluster with the job digits, which trains in two pods: objects in memory, and what their
controllers and kubelets do with them. The pods hold the recorded run of `runs`, so its agents
answer, its logs are read, and commands run on its folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.cluster.api import Asked, Reply
from tests.cli.cluster.objects import Store
from tests.cli.status import objects
from tests.cli.status.objects import Document

CORE = "/api/v1/namespaces/ml"
WORKLOAD = "/apis/batch/v1/namespaces/ml/jobs/digits"
PODS = (f"{CORE}/pods/digits-0-4cv9x", f"{CORE}/pods/digits-1-t7m2k")
RESUMED = '{"time":"2026-11-23T13:48:09.700Z","event":"resumed","level":"info","rank":0,"step":64}'
_READY = {"conditions": [{"type": "Ready", "status": "True"}]}
_NODES: dict[str, list[Document]] = {
    "/api/v1/nodes": [
        {"metadata": {"name": name}, "status": _READY} for name in ("worker-1", "worker-2")
    ],
    "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases": [],
}
JOB = """\
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata:
  name: digits
spec:
  image: registry.example.com/trainer:1
  backend: job
  nodes: 2
  checkpoints:
    size: 10Gi
  train:
    workload: digits
    steps: 100
"""


class Cluster(Store):
    """Answers as the API server of this cluster; `root` is the run folder that its pods hold."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._starts = 0
        created = (("digits-0-4cv9x", "worker-1"), ("digits-1-t7m2k", "worker-2"))
        for index, (pod, node) in enumerate(created):
            self._add_event(
                2 * index, pod, "Scheduled", f"Successfully assigned ml/{pod} to {node}"
            )
            self._add_event(2 * index + 1, pod, "Started", "Started container trainer")

    def put(self, path: str, document: dict[str, Any]) -> None:
        """Place an object; the Job's controller starts or ends its pods."""
        document["metadata"]["creationTimestamp"] = objects.at(14)
        super().put(path, document)
        if path == WORKLOAD:
            self._place_pods()

    def __call__(self, asked: Asked) -> Reply:
        if asked.path in _NODES:
            return Reply(document={"items": _NODES[asked.path]})
        found = next(
            (path for path in PODS if asked.path.startswith((f"{path}/", f"{path}:"))), None
        )
        if found is not None and found in self.objects:
            return self._answer_pod(asked, PODS.index(found))
        reply = super().__call__(asked)
        if asked.path == f"{CORE}/pods" and self._is_suspended():
            self._remove_pods()  # whoever waits has seen how they ended
        return reply

    def _is_suspended(self) -> bool:
        return bool(self.objects.get(WORKLOAD, {}).get("spec", {}).get("suspend"))

    def _remove_pods(self) -> None:
        for path in PODS:
            self.objects.pop(path, None)

    def _delete(self, asked: Asked) -> Reply:
        reply = super()._delete(asked)
        if asked.path == WORKLOAD and WORKLOAD not in self.objects:
            self._remove_pods()
        return reply

    def _place_pods(self) -> None:
        """The pods as they are just after the workload was changed."""
        suspended = self._is_suspended()
        self._starts += not suspended and PODS[0] not in self.objects
        stopped = objects.record(200, None, outcome="stopped", step=64)
        for index, path in enumerate(PODS):
            name = path.rpartition("/")[2]
            found = (
                objects.ended_pod(index, 200, "Error", stopped, name=name)
                if suspended
                else objects.pod(index, name=name, node=f"worker-{index + 1}")
            )
            for each in found["status"]["containerStatuses"]:
                each["state"].get("running", {})["startedAt"] = objects.at(13)
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "uid": WORKLOAD}
            found["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
            self.put(path, found)

    def _add_event(self, number: int, pod: str, reason: str, message: str) -> None:
        event: Document = {
            "metadata": {"name": f"event-{number}", "namespace": "ml", "uid": str(number)},
            "involvedObject": {"kind": "Pod", "name": pod, "namespace": "ml"},
            "type": "Normal",
            "reason": reason,
            "message": message,
            "lastTimestamp": objects.at(14 - number),
        }
        self.put(f"{CORE}/events/event-{number}", event)

    def _answer_pod(self, asked: Asked, index: int) -> Reply:
        scratch = self._root / f"node-{index}"
        if asked.path.endswith("/log"):
            lines = _lines(scratch / "log") + [RESUMED] * (self._starts > 1)
            tail = int(asked.query.get("tailLines") or len(lines))
            return Reply(lines=[_stamped(line) for line in lines[-tail:]])
        if asked.path.endswith("/metrics"):
            return Reply(lines=_lines(scratch / "metrics.txt"))
        if asked.path.endswith("/status"):
            return Reply(document=self._report(scratch))
        return Reply(channels={} if not asked.command else self._run(asked, scratch))

    def _report(self, scratch: Path) -> Document:
        """What the agent says of itself, with what it was told by the job's ConfigMap."""
        config_map = self.objects[f"{CORE}/configmaps/digits"]
        run_id = config_map["metadata"]["annotations"]["kdist.dev/run-id"]
        nodes = json.loads(config_map["data"]["nodes.json"])
        reported: Document = json.loads((scratch / "status.json").read_text())
        return {**reported, "nodes": nodes, "run_id": run_id}

    def _run(self, asked: Asked, scratch: Path) -> dict[int, bytes]:
        """Run a command on this machine, with the folders of the pod."""
        folders = {"python": sys.executable, "/run/kdist": str(scratch)}
        words = [
            str(self._root / "checkpoints") if word.startswith("/checkpoints/") else word
            for word in asked.command
        ]
        done = subprocess.run(
            [folders.get(word, word) for word in words], capture_output=True, check=False
        )
        code = {"reason": "ExitCode", "message": str(done.returncode)}
        ended: Document = {"status": "Success"}
        if done.returncode:
            ended = {"status": "Failure", "details": {"causes": [code]}}
        return {1: done.stdout, 2: done.stderr, 3: json.dumps(ended).encode()}


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _stamped(line: str) -> str:
    """A line as the kubelet keeps it."""
    return f"{json.loads(line)['time'].removesuffix('Z')}000000Z {line}"
