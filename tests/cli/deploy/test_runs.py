"""A run reads what it was started with; after a failure it goes on with what was mended, and
another name begins another run.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

CONFIG_MAPS = f"{CORE}/configmaps"
RENDEZVOUS = f"{CONFIG_MAPS}/digits-rendezvous"


def reported(store: Store) -> dict[str, dict[str, Any]]:
    """Every train.json in the cluster, by the name of the ConfigMap that holds it."""
    maps = [
        each
        for path, each in store.objects.items()
        if path.startswith(f"{CONFIG_MAPS}/digits-train-")
    ]
    assert all(each["immutable"] is True for each in maps)
    return {each["metadata"]["name"]: json.loads(each["data"]["train.json"]) for each in maps}


def fail(store: Store, backend: str) -> None:
    """Let the workload be over, and its agents' result be in their store, as after a failure for
    good.
    """
    workload = store.objects[PLACES[backend]]
    if backend == "statefulset":
        workload["spec"]["replicas"] = 0
        workload["metadata"].setdefault("annotations", {})["kdist.dev/outcome"] = json.dumps(
            {"code": 70, "cause": "user_code"}
        )
    else:
        workload["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    result = b64encode(b"{}").decode()
    store.objects[RENDEZVOUS]["binaryData"] = {
        "kdist_2fr_2frun_5fresult": result,
        "torch.rendezvous.r": result,
    }


def test_other_nodes_are_reported_at_once_and_all_else_stands_under_another_name(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    sent = ("apply", str(file), "--set", "spec.backend=statefulset")
    kdist(*sent)
    ((first, config),) = reported(store).items()
    assert "nodes" not in config
    expected = {"min": 2, "max": 3}
    assert json.loads(store.objects[f"{CONFIG_MAPS}/digits"]["data"]["nodes.json"]) == expected
    kdist(*sent, "--set", "spec.nodes={min: 1, max: 3}")
    assert list(reported(store)) == [first]
    assert json.loads(store.objects[f"{CONFIG_MAPS}/digits"]["data"]["nodes.json"]) == {
        "min": 1,
        "max": 3,
    }
    pod = {"metadata": {"name": "digits-0", "labels": {"kdist.dev/job": "digits"}}}
    mounts = [{"projected": {"sources": [{"configMap": {"name": first}}]}}]
    store.put(
        "/api/v1/namespaces/ml/pods/digits-0",
        {"apiVersion": "v1", "kind": "Pod", **pod, "spec": {"volumes": mounts}},
    )
    changed = kdist(*sent, "--set", "spec.train.globalBatch=24")
    assert "reach the pods of digits with `kdist restart digits -n ml`" in changed.stderr
    assert reported(store)[first] == config, "what the pods were started with"
    assert len(reported(store)) == 2


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.sampled
def test_after_a_failure_what_was_mended_goes_on_as_the_same_run(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    sent = ("apply", str(file), "--set", f"spec.backend={backend}")
    assert kdist(*sent).exit_code == Code.OK
    run = store.objects[f"{CONFIG_MAPS}/digits"]["metadata"]["annotations"]["kdist.dev/run-id"]
    fail(store, backend)
    (file.parent / "src" / "mine.py").write_text("answer = 42\n")
    mended = kdist(*sent, "--set", "spec.train.globalBatch=24")
    assert mended.exit_code == Code.OK, mended.stderr
    assert (
        "job digits has already failed: the applied changes take effect with "
        "`kdist restart digits -n ml`" in mended.stderr
    )
    restarted = kdist("restart", "digits", "--no-wait", "--accept-changes")
    assert restarted.exit_code == Code.OK, restarted.stderr
    workload = json.dumps(
        [
            store.objects[PLACES[backend]],
            *(each for path, each in store.objects.items() if "runtimes" in path),
        ]
    )
    (config,) = reported(store).values()
    assert config["train"]["globalBatch"] == 24
    (code,) = [path.rpartition("/")[2] for path in store.objects if "/digits-code-" in path]
    assert "42" in json.dumps(store.objects[f"{CONFIG_MAPS}/{code}"])
    assert all(f'"{name}"' in workload for name in (*reported(store), code))
    assert f"--run-id={run}" in workload
    assert "conditions" not in workload
    assert "binaryData" not in store.objects[RENDEZVOUS], "the old result would end the new pods"


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
@pytest.mark.sampled
def test_a_restart_makes_a_running_workload_again_that_would_keep_what_it_was_started_with(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    sent = ("apply", str(file), "--set", f"spec.backend={backend}")
    kdist(*sent)
    assert kdist(*sent, "--set", "spec.train.globalBatch=24").exit_code == Code.OK
    store.objects[PLACES[backend]]["status"] = {"startTime": "2026-01-01T00:00:00Z"}
    restarted = kdist("restart", "digits", "--no-wait", "--accept-changes")
    assert restarted.exit_code == Code.OK, restarted.stderr
    assert "status" not in store.objects[PLACES[backend]]


def test_a_job_whose_workload_is_gone_is_sent_again_as_the_same_run(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    sent = ("apply", str(file), "--set", "spec.backend=job")
    kdist(*sent)
    run = store.objects[f"{CONFIG_MAPS}/digits"]["metadata"]["annotations"]["kdist.dev/run-id"]
    fail(store, "job")
    del store.objects[PLACES["job"]]
    assert kdist(*sent).exit_code == Code.OK
    assert f"--run-id={run}" in json.dumps(store.objects[PLACES["job"]])
    assert "binaryData" not in store.objects[RENDEZVOUS]


def test_a_rendered_job_is_one_run_however_it_is_edited_until_it_gives_it_another_name(
    file: Path, kdist: Kdist
) -> None:
    def find(*sets: str) -> list[str]:
        words = [word for each in sets for word in ("--set", each)]
        text = kdist("render", str(file), "--set", "spec.checkpoints={claim: c}", *words).stdout
        return re.findall(r"^ +- \W??(--(?:run-id|checkpoints)=[^'\"\n]+)", text, re.MULTILINE)

    plain = ["--run-id=$(KDIST_NAMESPACE)/digits", "--checkpoints=/checkpoints/digits"]
    assert find() == find("spec.maxRestarts=3") == plain
    assert find("metadata.namespace=ml")[0] == "--run-id=ml/digits"
    named = find("metadata.namespace=ml", 'metadata.annotations={kdist.dev/run: "2"}')
    assert named == ["--run-id=ml/2", "--checkpoints=/checkpoints/digits@2"]
