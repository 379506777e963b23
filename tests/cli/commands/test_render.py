"""`kdist render`: what is shown, in which format, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Kdist

IMAGE = ("--set", "spec.image=a/b:1")


def test_the_objects_are_what_kubectl_takes(kdist: Kdist, job_file: Path) -> None:
    result = kdist("render", *IMAGE)
    assert result.exit_code == 0
    documents = list(yaml.safe_load_all(result.stdout))
    assert [each["kind"] for each in documents][-1] == "Job"
    assert kdist("render", str(job_file), *IMAGE).stdout == result.stdout


def test_json_holds_the_same_objects_in_one_list(kdist: Kdist, job_file: Path) -> None:
    found = json.loads(kdist("render", *IMAGE, "-o", "json").stdout)
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    assert found["items"] == list(yaml.safe_load_all(kdist("render", *IMAGE).stdout))


def test_a_list_repeats_the_warnings_and_no_object_in_it_does(kdist: Kdist, job_file: Path) -> None:
    result = kdist("render", *IMAGE, "--backend", "statefulset", "-o", "json")
    found = json.loads(result.stdout)
    assert found["warnings"]
    assert all(each in result.stderr for each in found["warnings"])
    assert not any("warnings" in each for each in found["items"])


def test_annotations_are_comments_and_nothing_else(kdist: Kdist, job_file: Path) -> None:
    plain, annotated = (kdist("render", *IMAGE, *more).stdout for more in ((), ("--annotate",)))
    assert list(yaml.safe_load_all(plain)) == list(yaml.safe_load_all(annotated))
    assert (
        "            image: a/b:1  # spec.image" in annotated
        or "        image: a/b:1  # spec.image" in annotated
    )
    assert kdist("render", *IMAGE, "--annotate", "-o", "json").exit_code == 2


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("statefulset", "StatefulSet"),
        ("pytorchjob", "PyTorchJob"),
        ("jobset", "JobSet"),
        ("trainjob", "TrainJob"),
        ("auto", "Job"),
    ],
)
def test_the_workload_kind_can_be_chosen(
    kdist: Kdist, job_file: Path, backend: str, kind: str
) -> None:
    documents = list(yaml.safe_load_all(kdist("render", *IMAGE, "--backend", backend).stdout))
    assert documents[-1]["kind"] == kind


def test_what_a_kind_cannot_give_is_said_next_to_the_objects(kdist: Kdist, job_file: Path) -> None:
    result = kdist("render", *IMAGE, "--backend", "statefulset")
    assert "Warning: a StatefulSet never completes" in result.stderr
    assert "Warning" not in result.stdout


def test_a_missing_image_is_said_with_the_way_out(kdist: Kdist, job_file: Path) -> None:
    result = kdist("render")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Error: spec.image is missing: pods need the image of the trainer",
        "Hint: `--set spec.image=REGISTRY/NAME:TAG` sets it for this command",
        "Next: kdist explain spec",
    ]


def test_all_that_a_cluster_would_miss_is_said_at_once(kdist: Kdist, job_file: Path) -> None:
    result = kdist("render", "--set", 'spec.data=[{path: here, mountPath: "/data"}]')
    assert "spec.image is missing" in result.stderr
    assert "spec.data[0] has only the local path here" in result.stderr


def test_code_travels_with_the_job(kdist: Kdist, job_file: Path) -> None:
    (job_file.parent / "src" / "lib").mkdir(parents=True)
    (job_file.parent / "src" / "train.py").write_text("x = 1\n")
    (job_file.parent / "src" / "lib" / "deep.py").write_text("y = 2\n")
    documents = list(yaml.safe_load_all(kdist("render", *IMAGE, "--set", "spec.code=src").stdout))
    (packed,) = [each for each in documents if "-code-" in each["metadata"]["name"]]
    assert sorted(packed["data"].values()) == ["x = 1\n", "y = 2\n"]
    (volume,) = [
        each
        for each in documents[-1]["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "code"
    ]
    assert volume["configMap"]["name"] == packed["metadata"]["name"]
    assert [each["path"] for each in volume["configMap"]["items"]] == ["lib/deep.py", "train.py"]


def test_the_claim_of_the_checkpoints_is_rendered_apart_and_kept_by_those_who_prune(
    kdist: Kdist, job_file: Path
) -> None:
    sized = ("render", *IMAGE, "--set", "spec.checkpoints={size: 1Gi}")
    plain = kdist(*sized)
    assert "PersistentVolumeClaim" not in plain.stdout
    assert "persistentvolumeclaim/digits-checkpoints is left out" in plain.stderr
    (claim,) = yaml.safe_load_all(kdist(*sized, "--claims", "only").stdout)
    notes = claim["metadata"]["annotations"]
    assert notes["argocd.argoproj.io/sync-options"] == "Prune=false,Delete=false"
    assert notes["kustomize.toolkit.fluxcd.io/prune"] == "disabled"
    assert notes["helm.sh/resource-policy"] == "keep"
    objects = list(yaml.safe_load_all(plain.stdout))
    together = list(yaml.safe_load_all(kdist(*sized, "--claims", "with").stdout))
    assert [each for each in together if each not in objects] == [claim]
    assert kdist("render", *IMAGE, "--claims", "only").exit_code == 2


def test_a_tracker_without_checkpoints_is_refused_with_the_way_out(
    kdist: Kdist, job_file: Path
) -> None:
    document = yaml.safe_load(job_file.read_text())
    document["spec"]["train"]["tracker"] = "wandb"
    document["spec"].pop("checkpoints", None)
    job_file.write_text(yaml.safe_dump(document))
    result = kdist("render", *IMAGE)
    assert result.exit_code == 1
    assert "spec.train.tracker" in result.stderr
    assert "set spec.checkpoints to {claim: NAME}" in result.stderr
    assert kdist("render", *IMAGE, "--set", "spec.checkpoints.size=1Gi").exit_code == 0
