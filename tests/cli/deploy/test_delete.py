"""What a job does not ask for any more is taken away when it is sent again: only what kdist
applied, and nothing pods need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE

LABELS = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
APPLIED = [{"manager": "kdist", "operation": "Apply"}]


def codes(store: Store) -> list[str]:
    """Names of the ConfigMaps with code that the cluster has."""
    return [path.rpartition("/")[2] for path in store.objects if "/configmaps/digits-code-" in path]


def pod_with(name: str) -> dict[str, Any]:
    spec = {"volumes": [{"name": "code", "configMap": {"name": name}}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "digits-0", "labels": LABELS},
        "spec": spec,
    }


def test_the_code_of_an_earlier_digest_goes_once_no_pod_mounts_it(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    (old,) = codes(store)
    store.put(f"{CORE}/pods/digits-0", pod_with(old))
    (file.parent / "src" / "mine.py").write_text("answer = 42\n")
    kdist("apply", str(file))
    assert old in codes(store), "a pod that starts its container again needs it"
    del store.objects[f"{CORE}/pods/digits-0"]

    shown = kdist("diff", str(file))
    assert shown.exit_code == 1
    assert f"--- live/ConfigMap/{old}" in shown.stdout
    assert any(line.startswith("-") and "answer = 41" in line for line in shown.stdout.splitlines())
    dry_run = kdist("apply", str(file), "--dry-run=server")
    assert f"configmap/{old} pruned (server dry run)" in dry_run.stdout
    sent = kdist("apply", str(file), "--error-unchanged")
    assert sent.exit_code == Code.OK, "something has changed"
    assert f"configmap/{old} pruned" in sent.stdout
    assert len(codes(store)) == 1
    assert kdist("apply", str(file), "--error-unchanged").exit_code == Code.UNCHANGED
    assert kdist("diff", str(file)).exit_code == 0


def test_what_is_switched_off_goes_but_never_a_claim(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    store.put(f"{CORE}/pods/digits-0", pod_with(codes(store)[0]))
    assert any("/poddisruptionbudgets/digits" in path for path in store.objects)
    sent = kdist("apply", str(file), "--set", "spec.nodes=1", "--set", "spec.checkpoints=null")
    assert sent.exit_code == Code.OK, sent.stderr
    assert [line for line in sent.stdout.splitlines() if line.endswith("pruned")] == [
        "poddisruptionbudget.policy/digits pruned"
    ]
    assert f"{CORE}/persistentvolumeclaims/digits-checkpoints" in store.objects


def test_a_bucket_is_never_touched_and_delete_names_what_stays_in_it(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    bucket = ("--set", "spec.checkpoints={url: 's3://bucket/runs/', secret: store}")
    sent = kdist("apply", str(file), *bucket)
    assert sent.exit_code == Code.OK, sent.stderr
    assert "loses all training progress" not in sent.stderr
    assert not [path for path in store.objects if "/persistentvolumeclaims/" in path]
    assert kdist("diff", str(file), *bucket).exit_code == 0
    gone = kdist("delete", "digits", "--purge")
    assert gone.exit_code == Code.OK, gone.stderr
    kept = "s3://bucket/runs/digits stays, with the checkpoints; kdist never deletes it"
    assert kept in gone.stderr
    assert not [each.path for each in api.asked if "/secrets/store" in each.path]


def test_nothing_is_sent_where_what_it_would_prune_may_not_be_deleted(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    before = dict(store.objects)
    store.may_not = {"delete poddisruptionbudgets"}
    refused = kdist(
        "apply", str(file), "--set", "spec.nodes=1", "--set", "spec.podTemplate.metadata.labels.x=y"
    )
    assert refused.exit_code == Code.FORBIDDEN
    assert "nothing was changed: you are" in refused.stderr
    assert "who may not delete poddisruptionbudgets.policy in namespace" in refused.stderr
    assert store.objects == before


def test_rights_stay_while_pods_live_that_were_started_with_them(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    store.put(f"{CORE}/pods/digits-0", pod_with(codes(store)[0]))
    without = ("--set", "spec.rendezvous=c10d")
    assert "pruned" not in kdist("apply", str(file), *without).stdout
    del store.objects[f"{CORE}/pods/digits-0"]
    gone = [
        line.split()[0]
        for line in kdist("apply", str(file), *without).stdout.splitlines()
        if line.endswith("pruned")
    ]
    assert gone == [
        "configmap/digits-rendezvous",
        "rolebinding.rbac.authorization.k8s.io/digits",
        "role.rbac.authorization.k8s.io/digits",
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {"managedFields": [{"manager": "her-editor", "operation": "Update"}]},
        {
            "managedFields": APPLIED,
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "digits"}],
        },
    ],
)
def test_what_others_made_or_own_is_left_alone(
    api: Api, store: Store, file: Path, kdist: Kdist, extra: dict[str, Any]
) -> None:
    kdist("apply", str(file))
    metadata = {"name": "digits-notes", "labels": LABELS, **extra}
    store.put(
        f"{CORE}/configmaps/digits-notes",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata},
    )
    assert kdist("apply", str(file), "--error-unchanged").exit_code == Code.UNCHANGED
    assert f"{CORE}/configmaps/digits-notes" in store.objects
