"""A cluster whose `worker-2` has lost power with the second pod of the job digits on it: objects in
memory, as the API server shows them a minute later.
"""

from __future__ import annotations

from typing import Any

from kdist import backends
from kdist.cluster import resources
from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.cluster.objects import Store
from tests.cli.status.objects import Document, at, lost_pod, pod, report

CORE = "/api/v1/namespaces/ml"
FIRST, SECOND = f"{CORE}/pods/digits-0-abcde", f"{CORE}/pods/digits-1-abcde"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CLUSTER_WIDE = {
    "/api/v1/nodes": "nodes",
    _LEASES: "leases",
    "/apis/storage.k8s.io/v1/volumeattachments": "attachments",
}


class BrokenCluster(Store):
    """Answers as the API server of this cluster.

    Attributes:
        lists: the objects of the cluster as a whole: `nodes`, `leases`, `attachments`.
        answers: `/status` of the agents that answer, by pod.
        forbidden: lists that the user may not read.
    """

    def __init__(self) -> None:
        super().__init__()
        names = ("control", "worker-1", "worker-2")
        self.lists: dict[str, list[Document]] = {
            "nodes": [_node(name, "Unknown" if name == "worker-2" else "True") for name in names],
            "leases": [_lease(name, 60 if name == "worker-2" else 0) for name in names],
            "attachments": [],
        }
        peers = {"heard": ["10.0.0.1"], "silent": [], "age_seconds": 0.5}
        self.answers = {"digits-0-abcde": {**report("rendezvous"), "run_id": "", "peers": peers}}
        self.forbidden: set[str] = set()

    def place_pods(self, backend: str, **metadata: Any) -> None:
        """Place the pods of the job, which was sent before, and what stands between it and them;
        `metadata` is added to that of the second one.
        """
        kind = backends.get(backend)
        path = resources.path(kind.api_version, kind.kind, namespace="ml", name="digits")
        owner: Document = {"kind": kind.kind, "name": "digits", "uid": path}
        for api_version, between, name in kind.pod_owners("digits"):
            path = resources.path(api_version, between, namespace="ml", name=name)
            owned = {"name": name, "uid": path, "ownerReferences": [owner]}
            self.put(path, {"kind": between, "metadata": owned})
            owner = {"kind": between, "name": name, "uid": path}
        for path, found in ((FIRST, pod(0)), (SECOND, lost_pod(1))):
            found["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
            self.put(path, found)
        self.objects[SECOND]["metadata"] |= metadata

    def __call__(self, asked: Asked) -> Reply:
        if asked.path in _CLUSTER_WIDE:
            name = _CLUSTER_WIDE[asked.path]
            if name in self.forbidden:
                what = f'cannot list resource "{name}" at the cluster scope'
                return refusal(403, f'{name} is forbidden: User "jane" {what}', "Forbidden")
            return Reply(document={"metadata": {}, "items": self.lists[name]})
        if asked.path.startswith(f"{CORE}/pods/") and ":" in asked.path:
            name = asked.path.removeprefix(f"{CORE}/pods/").partition(":")[0]
            found = self.answers.get(name)
            return refusal(503, "connection refused") if found is None else Reply(document=found)
        return super().__call__(asked)

    def _patch(self, asked: Asked) -> Reply:
        """The status is a resource of its own, and changes nothing else."""
        if not asked.path.endswith("/status"):
            return super()._patch(asked)
        body = {key: asked.body[key] for key in ("metadata", "status")}
        path = asked.path.removesuffix("/status")
        parent = Asked(asked.method, path, asked.query, body, asked.headers)
        return super()._patch(parent)

    def _delete(self, asked: Asked) -> Reply:
        """Without a kubelet, a pod that gets time to end stays."""
        if asked.path == SECOND and asked.body.get("gracePeriodSeconds") != 0:
            self.objects[SECOND]["metadata"]["deletionTimestamp"] = at(0)
            return Reply()
        return super()._delete(asked)


def _node(name: str, ready: str) -> Document:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": at(15), "message": ""}
    return {"metadata": {"name": name}, "status": {"conditions": [condition]}}


def _lease(name: str, ago: float) -> Document:
    spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": at(ago)}
    return {"metadata": {"name": name}, "spec": spec}
