"""What a command would send again is compared with what runs: where only the job's ConfigMap says
so, the user sees the difference and is asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

CONFIG_MAP = f"{CORE}/configmaps/digits"
ENDED = {"conditions": [{"type": "Failed", "status": "True"}]}


def tamper(store: Store, **spec: Any) -> None:
    """Change `job.json` as somebody may who may edit ConfigMaps."""
    data = store.objects[CONFIG_MAP]["data"]
    document = json.loads(data["job.json"])
    document["spec"] |= spec
    data["job.json"] = json.dumps(document)


def image(store: Store) -> str:
    pod = store.objects[PLACES["job"]]["spec"]["template"]["spec"]
    return str(pod["containers"][0]["image"])


@pytest.mark.parametrize("command", ["scale --nodes 4", "restart"])
def test_what_would_change_beyond_the_request_is_shown_and_refused_without_a_terminal(
    api: Api, store: Store, file: Path, kdist: Kdist, command: str
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    if command == "restart":
        store.objects[PLACES["job"]]["status"] = ENDED
    tamper(store, image="evil:1", checkpoints=None)
    before = json.dumps(store.objects)
    verb, *options = command.split()
    refused = kdist(verb, "digits", *options, "--no-wait")
    assert refused.exit_code == Code.USAGE
    assert "+        image: evil:1" in refused.stderr
    assert "-        image: registry.example.com/trainer:1" in refused.stderr
    assert "ConfigMap digits in namespace ml differs from what runs: job.batch/digits" in (
        refused.stderr
    )
    assert "--accept-changes sends this" in refused.stderr
    assert json.dumps(store.objects) == before
    if command == "restart":  # which can change the pods of a Job
        sent = kdist(verb, "digits", *options, "--no-wait", "--accept-changes")
        assert sent.exit_code == Code.OK, sent.stderr
        assert "+        image: evil:1" in sent.stderr
        assert image(store) == "evil:1"


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.sampled
def test_nobody_is_asked_about_a_job_that_is_as_it_was_applied(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    assert kdist("apply", str(file), "--set", f"spec.backend={backend}").exit_code == Code.OK
    workload = store.objects[PLACES[backend]]
    workload["metadata"]["annotations"] |= {"example.com/seen": "by another program"}
    workload["metadata"]["labels"] |= {"example.com/seen": "too"}
    scaled = kdist("scale", "digits", "--nodes", "4", "--no-wait")
    assert scaled.exit_code == Code.OK or "cannot be scaled" in scaled.stderr, scaled.stderr
    again = kdist("scale", "digits", "--nodes", "2:4", "--no-wait")
    assert again.exit_code == Code.OK or "cannot be scaled" in again.stderr, again.stderr
    finish(store, backend)
    restarted = kdist("restart", "digits", "--no-wait")
    assert restarted.exit_code == Code.OK, restarted.stderr


def test_a_label_that_would_leave_the_workload_is_a_change(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    sent = ("apply", str(file), "--set", "spec.queue=team")
    assert kdist(*sent).exit_code == Code.OK
    workload = store.objects[PLACES["job"]]
    workload["status"] = ENDED
    labels: dict[str, Any] = {f"f:{key}": {} for key in workload["metadata"]["labels"]}
    fields = {"f:metadata": {"f:labels": labels}}
    workload["metadata"]["managedFields"] = [
        {"manager": "kdist", "operation": "Apply", "fieldsV1": fields}
    ]
    tamper(store, queue=None)
    refused = kdist("restart", "digits", "--no-wait")
    assert refused.exit_code == Code.USAGE
    assert "-    kueue.x-k8s.io/queue-name: team" in refused.stderr


def test_without_a_workload_the_whole_of_it_is_shown_before_it_is_made_again(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    del store.objects[PLACES["job"]]
    refused = kdist("restart", "digits", "--no-wait")
    assert refused.exit_code == Code.USAGE
    assert "there is no Job that shows that it is what was applied" in refused.stderr
    assert "+        image: registry.example.com/trainer:1" in refused.stderr
    assert PLACES["job"] not in store.objects
    assert kdist("restart", "digits", "--no-wait", "--accept-changes").exit_code == Code.OK
    assert image(store) == "registry.example.com/trainer:1"
    assert kdist("apply", str(file), "--error-unchanged").exit_code == Code.UNCHANGED


def test_the_pod_that_reads_checkpoints_is_made_from_what_runs(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    tamper(store, image="evil:1", serviceAccountName="evil")
    kdist("checkpoints", "digits")
    (made,) = [asked.body for asked in api.asked if asked.method == "POST" and _is_helper(asked)]
    assert made["spec"]["containers"][0]["image"] == "registry.example.com/trainer:1"
    assert "serviceAccountName" not in made["spec"]
    api.asked.clear()
    del store.objects[PLACES["job"]]
    refused = kdist("checkpoints", "digits")
    assert refused.exit_code == Code.USAGE
    assert "image: evil:1" in refused.stderr
    assert not any(_is_helper(asked) for asked in api.asked)
    kdist("checkpoints", "digits", "--accept-changes")
    assert any(_is_helper(asked) for asked in api.asked)


def _is_helper(asked: Any) -> bool:
    return asked.path == f"{CORE}/pods" and "-viewer-" in json.dumps(asked.body or {})


def test_a_namespace_that_a_config_map_names_is_ignored_and_named(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    data = store.objects[CONFIG_MAP]["data"]
    document = json.loads(data["job.json"])
    document["metadata"]["namespace"] = "kube-system"
    data["job.json"] = json.dumps(document)
    scaled = kdist("scale", "digits", "--nodes", "4", "--no-wait")
    assert scaled.exit_code == Code.OK, scaled.stderr
    assert "names the namespace kube-system, which is ignored" in scaled.stderr
    written = json.loads(store.objects[CONFIG_MAP]["data"]["job.json"])
    assert written["metadata"]["namespace"] == "ml"
    document["metadata"]["name"] = "other"
    store.objects[CONFIG_MAP]["data"]["job.json"] = json.dumps(document)
    refused = kdist("scale", "digits", "--nodes", "3", "--no-wait")
    assert refused.exit_code == Code.ERROR
    assert "ConfigMap digits contains the job other" in refused.stderr


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.sampled
def test_a_restart_sends_what_was_applied_to_a_finished_job_without_asking(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    options = ("--set", f"spec.backend={backend}")
    assert kdist("apply", str(file), *options).exit_code == Code.OK
    finish(store, backend)
    mended = (*options, "--set", "spec.image=registry.example.com/mended:2")
    assert kdist("apply", str(file), *mended).exit_code == Code.OK
    finish(store, backend)
    before = json.dumps(store.objects[CONFIG_MAP])
    tamper(store, image="evil:1")
    refused = kdist("restart", "digits", "--no-wait")
    assert refused.exit_code == Code.USAGE
    store.objects[CONFIG_MAP] = json.loads(before)
    restarted = kdist("restart", "digits", "--no-wait")
    assert restarted.exit_code == Code.OK, restarted.stderr
    assert "mended:2" in json.dumps(store.objects)


def test_what_was_applied_before_the_last_apply_is_asked_about_again(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    finish(store, "job")
    assert kdist("apply", str(file), "--set", "spec.image=first:1").exit_code == Code.OK
    config_map = json.dumps(store.objects[CONFIG_MAP])
    assert kdist("apply", str(file), "--set", "spec.image=second:2").exit_code == Code.OK
    store.objects[CONFIG_MAP] = json.loads(config_map)
    refused = kdist("restart", "digits", "--no-wait")
    assert refused.exit_code == Code.USAGE
    assert "+        image: first:1" in refused.stderr


def finish(store: Store, backend: str) -> None:
    """Let the workload have failed, as its controller writes it."""
    workload = store.objects[PLACES[backend]]
    words = ENDED["conditions"][0] if backend != "statefulset" else {}
    workload["status"] = {"conditions": [words]}
    if backend == "statefulset":
        outcome = {"kdist.dev/outcome": '{"code": 1, "outcome": "failed"}'}
        workload["metadata"]["annotations"] |= outcome
        workload["spec"]["replicas"] = 0
