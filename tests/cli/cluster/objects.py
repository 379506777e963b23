"""Objects in the memory of a test's server: enough of the Kubernetes API to send jobs, look at them
and take them away.
"""

from __future__ import annotations

import copy
import time
from typing import Any

from kdist.manifest import CODE_SENT, COMMIT
from tests.cli.cluster.api import Asked, Reply, refusal

KINDS = {
    "batch/v1": ["Job"],
    "apps/v1": ["StatefulSet"],
    "kubeflow.org/v1": ["PyTorchJob"],
    "jobset.x-k8s.io/v1alpha2": ["JobSet"],
    "trainer.kubeflow.org/v1alpha1": ["TrainJob", "TrainingRuntime"],
}


def merge_patch(found: Any, patch: Any) -> Any:
    """What a JSON merge patch makes of a document, in a copy."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


class Store:
    """Answers an `Api` with objects by their path. `may` says what reviews of rights answer but for
    those in `may_not` (`patch pods`), `deaf` how often Trainer has yet to refuse a TrainJob because
    it has not heard of its runtime. Secrets are created and nothing else, and go with their owner.
    """

    def __init__(self, *, may: bool = True) -> None:
        self.may = may
        self.may_not: set[str] = set()
        self.objects: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.deaf = 0
        self.insecure = ""
        self._version = 1  # which no object has

    def __call__(self, asked: Asked) -> Reply:
        if asked.path in ("/api", "/apis"):
            return Reply(document={"items": _groups() if asked.path == "/apis" else []})
        if asked.path.endswith("selfsubjectaccessreviews"):
            asked_for = asked.body["spec"]["resourceAttributes"]
            return Reply(
                201, {"status": {"allowed": self.may and _name(asked_for) not in self.may_not}}
            )
        if asked.path.endswith("selfsubjectrulesreviews"):
            return Reply(201, {"status": {"resourceRules": []}})
        if asked.path.endswith("selfsubjectreviews"):
            return Reply(201, {"status": {"userInfo": {"username": "jane"}}})
        if "watch" in asked.query:
            time.sleep(0.1)
            return Reply(lines=[])
        assert asked.method == "POST" or "/secrets" not in asked.path, asked
        return {"GET": self._get, "POST": self._post, "PATCH": self._patch, "DELETE": self._delete}[
            asked.method
        ](asked)

    def put(self, path: str, document: dict[str, Any]) -> None:
        """Place an object, as a controller would."""
        self._version += 1
        document.setdefault("metadata", {})["resourceVersion"] = str(self._version)
        self.objects[path] = document

    def _get(self, asked: Asked) -> Reply:
        if asked.path in self.objects:
            return Reply(document=self.objects[asked.path])
        # a resource stands right behind the namespace, a name does not
        if asked.path.rsplit("/", 2)[-2] == "ml":
            wanted = dict(
                part.partition("=")[::2]
                for part in asked.query.get("labelSelector", "").split(",")
                if "=" in part
            )
            inside = [
                each for path, each in self.objects.items() if path.rpartition("/")[0] == asked.path
            ]
            found = [
                each
                for each in inside
                if wanted.items() <= (each["metadata"].get("labels") or {}).items()
            ]
            return Reply(
                document={"metadata": {"resourceVersion": str(self._version)}, "items": found}
            )
        name = asked.path.rpartition("/")[2]
        return refusal(404, f'"{name}" not found', "NotFound", name=name)

    def _post(self, asked: Asked) -> Reply:
        """A pod: one that is only tried, of which `insecure` is what Pod Security says, or a helper
        pod, which ends at once.
        """
        name = asked.body["metadata"]["name"]
        if asked.body["kind"] == "Secret":
            return self._create_secret(f"{asked.path}/{name}", asked.body)
        assert asked.path.rpartition("/")[2] == "pods", asked
        if "dryRun" not in asked.query:
            pod = {**asked.body, "metadata": {**asked.body["metadata"], "uid": name}}
            self.put(f"{asked.path}/{name}", {**pod, "status": {"phase": "Failed"}})
            return Reply(201, pod)
        if self.insecure and "create pods" in self.may_not:
            what = 'cannot create resource "pods" in API group "" in the namespace "ml"'
            return refusal(403, f'pods is forbidden: User "jane" {what}', "Forbidden")
        if self.insecure:
            return refusal(
                403, f'pods "{name}" is forbidden: violates {self.insecure}', "Forbidden"
            )
        return Reply(201, asked.body)

    def _create_secret(self, path: str, document: dict[str, Any]) -> Reply:
        if "create secrets" in self.may_not:
            what = 'cannot create resource "secrets" in API group "" in the namespace "ml"'
            return refusal(403, f'secrets is forbidden: User "jane" {what}', "Forbidden")
        if path in self.secrets:
            return refusal(409, f'secrets "{path}" already exists', "AlreadyExists")
        self.secrets[path] = document
        return Reply(201, document)

    def _patch(self, asked: Asked) -> Reply:
        if "/trainjobs/" in asked.path and self.deaf:
            self.deaf -= 1
            return refusal(
                403, 'TrainingRuntime "digits" not found: it must be created first', "Forbidden"
            )
        before = self.objects.get(asked.path)
        if before is not None and (refused := _refuse_race(asked.body["metadata"], before)):
            return refused
        if asked.headers.get("content-type") == "application/merge-patch+json":
            if before is None:
                return refusal(404, f'"{asked.path}" not found', "NotFound", name=asked.path)
            merged = merge_patch(before, asked.body)
            if "dryRun" not in asked.query:
                self.put(asked.path, merged)
            return Reply(200, merged)
        kept = {} if before is None else {"uid": before["metadata"].get("uid", asked.path)}
        # which a merge patch gave it
        if before is not None and "ownerReferences" in before["metadata"]:
            kept["ownerReferences"] = before["metadata"]["ownerReferences"]
        old = {} if before is None else before["metadata"].get("annotations") or {}
        if notes := {key: old[key] for key in (CODE_SENT, COMMIT) if key in old}:
            kept["annotations"] = {**notes, **asked.body["metadata"]["annotations"]}
        kept["managedFields"] = [{"manager": asked.query["fieldManager"], "operation": "Apply"}]
        body = {**asked.body, "metadata": {**asked.body["metadata"], "uid": asked.path, **kept}}
        if "dryRun" not in asked.query:
            self.put(asked.path, body)
        warned = self.insecure and asked.body["kind"] in ("Job", "StatefulSet")
        headers = {"Warning": f'299 - "would violate {_quote(self.insecure)}"'} if warned else {}
        return Reply(200 if before else 201, body, headers)

    def _delete(self, asked: Asked) -> Reply:
        if asked.body.get("dryRun"):
            return (
                Reply()
                if asked.path in self.objects
                else refusal(404, "not found", "NotFound", name=asked.path)
            )
        runtime = self.objects.get(asked.path.replace("/trainjobs/", "/trainingruntimes/"), {})
        owned = "/trainjobs/" in asked.path and runtime.get("metadata", {}).get("ownerReferences")
        # it goes first, and the webhooks keep a TrainJob without
        if owned and asked.body["propagationPolicy"] == "Foreground":
            del self.objects[asked.path.replace("/trainjobs/", "/trainingruntimes/")]
            return Reply()
        before = self.objects.get(asked.path)
        if before is not None and (
            refused := _refuse_race(asked.body.get("preconditions") or {}, before)
        ):
            return refused
        if self.objects.pop(asked.path, None) is None:
            return refusal(404, "not found", "NotFound", name=asked.path)
        self.deleted.append(asked.path.split("/")[-2])
        return Reply()


def _refuse_race(expected: dict[str, Any], found: dict[str, Any]) -> Reply | None:
    """A refusal where a change was meant for another object than the one that is there, or for
    another state of it.
    """
    same = all(
        expected.get(key, value) == value
        for key, value in found["metadata"].items()
        if key in ("uid", "resourceVersion")
    )
    return None if same else refusal(409, "the object has been modified", "Conflict")


def _quote(text: str) -> str:
    return text.replace('"', '\\"')


def _name(attributes: dict[str, str]) -> str:
    return f"{attributes['verb']} {attributes['resource']}"


def _groups() -> list[dict[str, Any]]:
    found = []
    for version, kinds in KINDS.items():
        group, _, number = version.partition("/")
        resources = [{"responseKind": {"kind": kind}} for kind in kinds]
        found.append(
            {"metadata": {"name": group}, "versions": [{"version": number, "resources": resources}]}
        )
    return found
