"""The small pod that looks into checkpoints: like the training's pod where it must be, and able to
do no more than look.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist import backends
from kdist.jobs import helper_pod
from tests.cli.jobs import jobs


def build_helper_pod(backend: str = "job", *, read_only: bool = True) -> dict[str, Any]:
    target = jobs.target(backend=backend)
    return helper_pod.build_helper_pod(
        target, jobs.objects(target), "digits-viewer-1", ["python", "-m", "x"], read_only=read_only
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
