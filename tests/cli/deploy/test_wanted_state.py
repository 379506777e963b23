"""What the operator acts on by itself has its meaning without one too: the size for now,
suspension, a restart, code that is on the cluster already, and a claim that goes with its job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdist import backends
from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

CLAIM = f"{CORE}/persistentvolumeclaims/digits-checkpoints"


def find_workload(store: Store, backend: str = "job") -> dict[str, Any]:
    found: dict[str, Any] = store.objects[PLACES[backend]]
    return found


def find_pod(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = find_workload(store)["spec"]["template"]["spec"]
    return found


def test_replicas_are_the_nodes_that_a_job_has_for_now(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    nodes = f"{CORE}/configmaps/digits"
    assert kdist("apply", str(file), "--set", "spec.replicas=2").exit_code == Code.OK
    assert find_workload(store)["spec"]["parallelism"] == 2
    assert json.loads(store.objects[nodes]["data"]["nodes.json"]) == {"min": 2, "max": 2}
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert json.loads(store.objects[nodes]["data"]["nodes.json"]) == {"min": 2, "max": 3}


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.sampled
def test_a_job_can_be_applied_suspended_and_is_resumed_by_command(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    sent = ("apply", str(file), "--set", f"spec.backend={backend}")
    assert kdist(*sent, "--set", "spec.suspend=true").exit_code == Code.OK
    state = backends.get(backend).read(find_workload(store, backend))
    assert state.suspended
    asked = store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]
    assert asked["kdist.dev/asked"] == "suspended"
    again = kdist(*sent)
    assert "stays suspended: `kdist resume digits -n ml` starts it" in again.stderr
    assert backends.get(backend).read(find_workload(store, backend)).suspended
    resumed = json.loads(kdist("resume", "digits", "-n", "ml", "--no-wait", "-o", "json").stdout)
    assert resumed["message"] == "digits is being resumed"
    assert resumed["nextCommand"] == "kdist status digits -n ml -w"
    assert resumed["savedStep"] is None
    told = store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]
    assert "kdist.dev/started-at" in told, "why names what a user has asked for"


def test_a_job_that_runs_is_suspended_by_its_file(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    assert find_workload(store)["spec"]["suspend"] is False
    kdist("apply", str(file), "--set", "spec.suspend=true", "--dry-run=server")
    annotations = store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]
    assert "kdist.dev/asked" not in annotations
    kdist("apply", str(file), "--set", "spec.suspend=true")
    assert find_workload(store)["spec"]["suspend"] is True


def test_what_kueue_starts_cannot_be_applied_suspended(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    ended = kdist("apply", str(file), "--set", "spec.suspend=true", "--set", "spec.queue=team")
    assert ended.exit_code == Code.ERROR
    assert "Kueue starts" in ended.stderr
    assert "kdist suspend digits" in ended.stderr
    assert PLACES["job"] not in store.objects


def test_only_a_changed_time_of_restart_is_left_to_the_operator(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    at = ("--set", "spec.restartedAt=2026-05-01T12:00:00Z")
    assert kdist("apply", str(file), *at).exit_code == Code.OK, "a new job starts anyway"
    assert kdist("apply", str(file), *at).exit_code == Code.OK, "nothing is asked for"
    ended = kdist("apply", str(file), "--set", "spec.restartedAt=2026-05-01T13:00:00Z")
    assert ended.exit_code == Code.ERROR
    assert "kdist restart digits -n ml" in ended.stderr
    assert kdist("apply", str(file), "--set", "spec.restartedAt=null").exit_code == Code.OK


def test_code_of_a_config_map_is_mounted_and_never_sent_or_pruned(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {}}
    store.put(f"{CORE}/configmaps/mine", mine)
    sent = kdist("apply", str(file), "--set", "spec.code={configMap: mine}")
    assert sent.exit_code == Code.OK, sent.stderr
    volumes = {each["name"]: each for each in find_pod(store)["volumes"]}
    assert volumes["code"]["configMap"]["name"] == "mine"
    assert not [path for path in store.objects if "digits-code-" in path]
    kdist("delete", "digits", "--no-wait")
    assert f"{CORE}/configmaps/mine" in store.objects


@pytest.mark.parametrize(("policy", "goes"), [("Delete", True), ("Retain", False), (None, False)])
def test_a_claim_goes_with_its_job_only_where_the_job_says_so(
    api: Api, store: Store, file: Path, kdist: Kdist, policy: str | None, goes: bool
) -> None:
    chosen = () if policy is None else ("--set", f"spec.checkpoints.reclaimPolicy={policy}")
    assert kdist("apply", str(file), *chosen).exit_code == Code.OK
    kept_by_tools = "helm.sh/resource-policy" in store.objects[CLAIM]["metadata"]["annotations"]
    assert kept_by_tools is not goes
    assert kdist("delete", "digits", "--no-wait").exit_code == Code.OK
    assert (CLAIM not in store.objects) is goes


def test_an_edited_reclaim_policy_changes_no_pod(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    before = find_pod(store)
    kdist("apply", str(file), "--set", "spec.checkpoints.reclaimPolicy=Delete")
    assert find_pod(store) == before
