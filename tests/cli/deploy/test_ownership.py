"""Of others nothing is changed or deleted, whatever its name and labels: an object is a job's by
the mark it was made with.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist

LABELS = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
MARK = "kdist.dev/owner"
OTHERS: dict[str, dict[str, Any]] = {
    "of that name": {"managedFields": [{"manager": "her-editor", "operation": "Update"}]},
    "with our labels": {
        "labels": LABELS,
        "managedFields": [{"manager": "kdist", "operation": "Apply"}],
    },
    "of another job": {"labels": LABELS},
}
SAYS = {
    "of that name": "was created by her-editor",
    "with our labels": "is not marked as kdist's",
    "of another job": "belongs to job other",
}


def replace(store: Store, path: str, whose: str) -> dict[str, Any]:
    """Put somebody else's object in the place of the job's; returns it as it is."""
    kind = store.objects[path]["kind"]
    metadata: dict[str, Any] = {"name": path.rpartition("/")[2], "uid": "theirs", **OTHERS[whose]}
    if whose == "of another job":
        metadata["annotations"] = {MARK: f"other/{kind.lower()}/{metadata['name']}"}
    store.put(
        path, {"apiVersion": store.objects[path]["apiVersion"], "kind": kind, "metadata": metadata}
    )
    return copy.deepcopy(store.objects[path])


@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        ("job", slice(None, None, 2)),
        *((backend, slice(-1, None)) for backend in ("statefulset", "jobset", "pytorchjob")),
        ("trainjob", slice(-2, None)),
    ],
)
@pytest.mark.sampled
def test_no_command_touches_what_is_not_of_the_job(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str, chosen: slice
) -> None:
    sent = ("apply", str(file), "--set", f"spec.backend={backend}")
    assert kdist(*sent).exit_code == Code.OK
    paths = list(store.objects)[chosen]  # the workload is sent last; on a real server all are tried
    for path, whose in zip(paths, itertools.cycle(OTHERS), strict=False):
        before = copy.deepcopy(store.objects)
        theirs = replace(store, path, whose)
        with_it = copy.deepcopy(store.objects)
        name = path.rpartition("/")[2]
        refused = kdist(*sent, "--set", "spec.nodes=2")  # which would prune too
        assert refused.exit_code == Code.ERROR, path
        assert store.objects == with_it, f"apply has changed something next to {path}"
        assert f"/{name} " in refused.stderr
        assert SAYS[whose] in refused.stderr
        if "-code-" not in name:  # which scaling has no use for
            scaled = kdist("scale", "digits", "--nodes", "2:2", "--no-wait")
            assert scaled.exit_code != Code.OK, path
            assert store.objects == with_it, f"scale has changed something next to {path}"
            assert SAYS[whose] in scaled.stderr or "cannot be scaled" in scaled.stderr
        deleted = kdist("delete", "digits", "--purge")
        assert deleted.exit_code == Code.OK, deleted.stderr
        if "-code-" not in name or whose != "of that name":
            assert f"/{name} stays: it does not belong to job digits" in deleted.stderr
        left = {
            each: found
            for each, found in store.objects.items()
            if "ownerReferences" not in found["metadata"]
        }
        assert left == {path: theirs}, f"all goes but {path}"
        store.objects = before


def test_the_copy_of_an_object_is_not_the_jobs(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    (code,) = [path for path in store.objects if "/configmaps/digits-code-" in path]
    copied = copy.deepcopy(store.objects[code])
    copied["metadata"] |= {"name": "digits-code-before", "uid": "theirs"}
    kept = code.replace(code.rpartition("/")[2], "digits-code-before")
    store.put(kept, copied)
    assert kdist("apply", str(file), "--error-unchanged").exit_code == Code.UNCHANGED
    assert kdist("delete", "digits", "--purge").exit_code == Code.OK
    assert list(store.objects) == [kept]


def test_a_foreign_pod_with_the_jobs_label_outlives_a_delete_that_hurries(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    path = "/api/v1/namespaces/ml/pods/notebook"
    store.put(
        path,
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "notebook", "labels": LABELS}},
    )
    deleted = kdist("delete", "digits", "--grace-period", "0", "--purge")
    assert deleted.exit_code == Code.OK
    assert "`kdist delete digits --orphans -n ml` deletes them" in deleted.stderr
    assert list(store.objects) == [path]


def test_a_claim_that_was_there_before_is_refused_with_the_way_to_use_it(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    path = "/api/v1/namespaces/ml/persistentvolumeclaims/digits-checkpoints"
    store.put(
        path,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "digits-checkpoints"},
        },
    )
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "`checkpoints: {claim: digits-checkpoints}`" in refused.stderr
    assert list(store.objects) == [path]


def test_a_controller_that_writes_in_between_is_no_obstacle(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    answer = api.answer
    written: list[str] = []

    def race(asked: Any) -> Any:
        reply = answer(asked)
        if asked.method == "GET" and asked.path.endswith("/jobs/digits") and len(written) < 2:
            reply.document = copy.deepcopy(reply.document)
            written.append(asked.path)
            store.put(asked.path, {**store.objects[asked.path], "status": {"active": len(written)}})
        return reply

    api.answer = race
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert len(written) == 2
