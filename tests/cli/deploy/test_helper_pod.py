"""The small pod that looks into checkpoints: like the training's pod where it must be, and able to
do no more than look.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kdist import backends, cluster
from kdist.deploy import helper_pod as pods
from kdist.errors import KdistError
from kdist.status.pods import CONFIG_FAILURES, PULL_FAILURES
from tests.cli.cluster.api import Api, write_kubeconfig
from tests.cli.cluster.objects import Store
from tests.cli.job.cluster import jobs

BUCKET = "url: 's3://bucket/runs', endpoint: 'http://minio:9000', secret: store"


def build_helper_pod(
    backend: str = "job", *, read_only: bool = True, checkpoints: str = "claim: shared"
) -> dict[str, Any]:
    target = jobs.target(backend=backend, checkpoints=checkpoints)
    return pods.build_helper_pod(
        target.job, target.backend, jobs.objects(target), ["python", "-m", "x"], read_only=read_only
    )


@pytest.mark.parametrize("backend", backends.NAMES)
def test_it_mounts_the_checkpoints_read_only_and_nothing_else_of_the_job(backend: str) -> None:
    spec = build_helper_pod(backend)["spec"]
    container = spec["containers"][0]
    assert container["image"] == "registry/trainer:1"
    assert [(mount["mountPath"], mount["readOnly"]) for mount in container["volumeMounts"]] == [
        ("/checkpoints", True)
    ]
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]] == [
        "shared"
    ]
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert spec["securityContext"]["runAsUser"] == 1234, "files of 0600 are read by their owner"


def test_it_is_restricted_has_no_token_and_does_not_count_as_a_pod_of_the_job() -> None:
    pod = build_helper_pod()
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "kdist.dev/job" not in labels


def test_only_to_put_a_folder_aside_it_may_write() -> None:
    assert (
        "readOnly"
        not in build_helper_pod(read_only=False)["spec"]["containers"][0]["volumeMounts"][0]
    )


@pytest.mark.parametrize("backend", backends.NAMES)
def test_for_a_bucket_it_has_room_for_a_copy_and_gets_in_as_the_training_does(backend: str) -> None:
    spec = build_helper_pod(backend, checkpoints=BUCKET)["spec"]
    (container,) = spec["containers"]
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - a pod's
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["KDIST_CHECKPOINTS_ENDPOINT"]["value"] == "http://minio:9000"
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    for name in names:
        reference = {"name": "store", "key": name, "optional": True}
        assert variables.pop(name)["valueFrom"] == {"secretKeyRef": reference}
    own = {"PYTHONDONTWRITEBYTECODE", "HOME", "KDIST_CHECKPOINTS_ENDPOINT"}
    assert set(variables) == own, "nothing else that the job knows"
    assert spec["serviceAccountName"] == "digits"
    assert spec["automountServiceAccountToken"] is False


def test_the_tools_are_given_the_address_of_the_run_in_its_bucket() -> None:
    target = jobs.target(checkpoints=BUCKET)
    assert target.checkpoints == "s3://bucket/runs/digits"
    assert jobs.target().checkpoints == "/checkpoints/digits"


@pytest.mark.parametrize("reason", PULL_FAILURES + CONFIG_FAILURES)
def test_a_pod_whose_container_cannot_start_is_waited_for_no_longer(
    reason: str, tmp_path: Path
) -> None:
    store = Store()
    waiting = {"reason": reason, "message": "reg/x:1 is not present"}
    status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    store.put("/api/v1/namespaces/ml/pods/digits-viewer-1", {"kind": "Pod", "status": status})
    with closing(Api(store)) as api:
        write_kubeconfig(tmp_path / "config", api.url)
        connection = cluster.connect(None, "ml", file=str(tmp_path / "config"))
        with pytest.raises(KdistError, match=f"cannot start: {reason}: reg/x:1 is not present"):
            pods.wait_for_phase(connection, "digits-viewer-1", ("Running",))
