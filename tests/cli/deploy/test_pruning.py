"""What a job does not ask for any more is taken away when it is sent again: only what kdist applied, and nothing pods need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist.errors import Code
from tests.cli.cluster.api import Api, write_kubeconfig
from tests.cli.cluster.conftest import Serve, serve
from tests.cli.cluster.store import Store
from tests.cli.conftest import Kdist

__all__ = ["serve"]

CORE = "/api/v1/namespaces/ml"
LABELS = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
APPLIED = [{"manager": "kdist", "operation": "Apply"}]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def api(store: Store, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """A server that the kubeconfig leads to."""
    served = serve(store)
    write_kubeconfig(tmp_path / "config", served.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return served


@pytest.fixture
def file(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job.yaml with code of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("answer = 41\n")
    document = yaml.safe_load(job)
    document["spec"] |= {
        "image": "registry.example.com/trainer:1",
        "backend": "statefulset",
        "nodes": {"min": 2, "max": 3},
        "code": "./src",
        "checkpoints": {"size": "1Gi"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def codes(store: Store) -> list[str]:
    """Names of the ConfigMaps with code that the cluster has."""
    return [path.rpartition("/")[2] for path in store.objects if "/configmaps/digits-code-" in path]


def pod_with(name: str) -> dict[str, Any]:
    spec = {"volumes": [{"name": "code", "configMap": {"name": name}}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits-0", "labels": LABELS}, "spec": spec}


def test_the_code_of_an_earlier_digest_goes_once_no_pod_mounts_it(api: Api, store: Store, file: Path, kdist: Kdist) -> None:
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
    rehearsed = kdist("apply", str(file), "--dry-run=server")
    assert f"configmap/{old} pruned (server dry run)" in rehearsed.stdout
    sent = kdist("apply", str(file), "--error-unchanged")
    assert sent.exit_code == Code.OK, "something has changed"
    assert f"configmap/{old} pruned" in sent.stdout
    assert len(codes(store)) == 1
    assert kdist("apply", str(file), "--error-unchanged").exit_code == Code.UNCHANGED
    assert kdist("diff", str(file)).exit_code == 0


def test_what_is_switched_off_goes_but_never_a_claim(api: Api, store: Store, file: Path, kdist: Kdist) -> None:
    kdist("apply", str(file))
    store.put(f"{CORE}/pods/digits-0", pod_with(codes(store)[0]))
    assert any("/poddisruptionbudgets/digits" in path for path in store.objects)
    sent = kdist("apply", str(file), "--set", "spec.nodes=1", "--set", "spec.checkpoints=null")
    assert sent.exit_code == Code.OK, sent.stderr
    assert [line for line in sent.stdout.splitlines() if line.endswith("pruned")] == ["poddisruptionbudget.policy/digits pruned"]
    assert f"{CORE}/persistentvolumeclaims/digits-checkpoints" in store.objects


def test_rights_stay_while_pods_live_that_were_started_with_them(api: Api, store: Store, file: Path, kdist: Kdist) -> None:
    kdist("apply", str(file))
    store.put(f"{CORE}/pods/digits-0", pod_with(codes(store)[0]))
    without = ("--set", "spec.rendezvous=c10d")
    assert "pruned" not in kdist("apply", str(file), *without).stdout
    del store.objects[f"{CORE}/pods/digits-0"]
    gone = [line.split()[0] for line in kdist("apply", str(file), *without).stdout.splitlines() if line.endswith("pruned")]
    assert gone == [
        "configmap/digits-rendezvous",
        "rolebinding.rbac.authorization.k8s.io/digits",
        "role.rbac.authorization.k8s.io/digits",
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {"managedFields": [{"manager": "her-editor", "operation": "Update"}]},
        {"managedFields": APPLIED, "ownerReferences": [{"kind": "Job", "name": "digits"}]},
    ],
)
def test_what_others_made_or_own_is_left_alone(api: Api, store: Store, file: Path, kdist: Kdist, extra: dict[str, Any]) -> None:
    kdist("apply", str(file))
    metadata = {"name": "digits-notes", "labels": LABELS, **extra}
    store.put(f"{CORE}/configmaps/digits-notes", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    assert kdist("apply", str(file), "--error-unchanged").exit_code == Code.UNCHANGED
    assert f"{CORE}/configmaps/digits-notes" in store.objects
