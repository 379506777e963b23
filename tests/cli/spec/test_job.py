"""The model of job.yaml: its defaults, what the trainer is told, and the rules that every field
follows.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from kdist.errors import InvalidJobError
from kdist.job_file import load_text
from kdist.spec import TrainingJob, list_warnings, reference
from tests.cli.conftest import JOB

FIELDS = list(reference.root().walk())
# Words that end a name of seconds, and those of names that do not count seconds.
SECONDS = [field for field in FIELDS if field.name.endswith("Seconds")]


@pytest.fixture
def smallest() -> TrainingJob:
    return load_text(JOB, source="job.yaml")


def test_defaults_are_explicit_in_the_document(smallest: TrainingJob) -> None:
    assert {
        key: value for key, value in smallest.to_document()["spec"].items() if key != "train"
    } == {
        "backend": "auto",
        "image": None,
        "install": None,
        "nodes": {"min": 1, "max": 1},
        "replicas": None,
        "suspend": False,
        "restartedAt": None,
        "procsPerNode": "auto",
        "threadsPerRank": 1,
        "resources": {"cpu": "1", "memory": "4Gi", "gpu": 0},
        "code": None,
        "data": [],
        "checkpoints": None,
        "env": [],
        "maxRestarts": None,
        "queue": None,
        "rendezvous": "auto",
        "nodeSelector": {},
        "tolerations": [],
        "imagePullSecrets": [],
        "priorityClass": None,
        "serviceAccountName": None,
        "terminationGracePeriodSeconds": 60,
        "ttlSecondsAfterFinished": 86_400,
        "rendezvousTimeoutSeconds": 600,
        "joinWindowSeconds": 10,
        "collectiveTimeoutSeconds": 300,
        "hangTimeoutSeconds": 300,
        "finalScrapeTimeoutSeconds": 30,
        "logs": {"keep": "64Mi"},
        "podTemplate": {},
        "preflight": None,
        "script": None,
    }


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("{gpu: 0}", ("1", "4Gi")),
        ("{gpu: 1}", ("3", "10Gi")),
        ("{gpu: 8}", ("24", "80Gi")),
        ("{gpu: 8, cpu: 2}", ("2", "80Gi")),
        ("{gpu: 8, memory: 1Gi}", ("24", "1Gi")),
    ],
)
def test_with_gpus_each_of_them_has_a_share_of_what_is_not_given(
    given: str, found: tuple[str, str]
) -> None:
    resources = load_text(f"{JOB}  resources: {given}\n", source="job.yaml").spec.resources
    assert (resources.cpu, resources.memory) == found


DEVICES = [
    ("limits: {amd.com/gpu: 1}", "amd.com/gpu"),
    ("requests: {nvidia.com/mig-1g.10gb: 1}, limits: {cpu: 4}", "nvidia.com/mig-1g.10gb"),
    ("claims: [{name: gpus}]", "claims"),
]


@pytest.mark.parametrize(("resources", "device"), DEVICES)
def test_a_device_of_the_pod_template_without_cpu_and_memory_is_worth_a_warning(
    resources: str, device: str
) -> None:
    container = f"{{name: trainer, resources: {{{resources}}}}}"
    text = f"{JOB}  podTemplate: {{spec: {{containers: [{container}]}}}}\n"
    (warning,) = list_warnings(load_text(text, source="job.yaml").spec)
    assert warning.startswith(f"podTemplate requests {device}, and each pod has only ")
    assert ("cpu 1" in warning) == ("cpu: 4" not in resources)
    assert "memory 4Gi" in warning
    for named in ("{cpu: 8, memory: 32Gi}", "{gpu: 1}"):
        job = load_text(f"{text}  resources: {named}\n", source="job.yaml")
        assert list_warnings(job.spec) == []


def test_a_document_is_a_job_file_of_the_same_job(smallest: TrainingJob) -> None:
    assert load_text(json.dumps(smallest.to_document()), source="again") == smallest


def test_a_stored_job_may_have_a_setting_that_was_removed(smallest: TrainingJob) -> None:
    for value in ("none", "warm"):
        document = smallest.to_document()
        document["spec"]["standby"] = value
        assert TrainingJob.model_validate(document, by_alias=True, by_name=False) == smallest
        assert load_text(json.dumps(document), source="stored", generated=True) == smallest
    assert load_text(JOB + "  standby: none\n", source="job.yaml") == smallest


def test_the_trainer_is_reported_all_that_the_job_says_about_training() -> None:
    text = JOB + (
        "  nodes: {min: 2, max: 3}\n  procsPerNode: 2\n  threadsPerRank: 4\n  "
        "maxRestarts: 7\n  terminationGracePeriodSeconds: 31\n"
    )
    text += (
        "  rendezvousTimeoutSeconds: 32\n  joinWindowSeconds: 33\n  collectiveTimeoutSeconds: "
        "34\n  hangTimeoutSeconds: 35\n"
    )
    text += "  finalScrapeTimeoutSeconds: 36\n  logs: {keep: 1Gi}\n"
    text += "  env: [{name: TOKEN, secret: {name: hub, key: token}}, {name: MODE, value: a}]\n"
    reported = load_text(text, source="job.yaml").to_train_config().to_document()
    train = reported.pop("train")
    assert reported == {
        "name": "digits",
        "nodes": {"min": 2, "max": 3},
        "procsPerNode": 2,
        "threadsPerRank": 4,
        "maxRestarts": 7,
        "terminationGracePeriodSeconds": 31,
        "rendezvousTimeoutSeconds": 32,
        "joinWindowSeconds": 33,
        "collectiveTimeoutSeconds": 34,
        "hangTimeoutSeconds": 35,
        "finalScrapeTimeoutSeconds": 36,
        "logs": {"keep": "1Gi"},
        "secretVariables": ["TOKEN"],
        "preflight": None,
        "script": None,
    }
    assert train["workload"] == "digits"
    assert train["checkpoint"] == {
        "mode": "async",
        "keep": 3,
        "load": "each",
    }


@pytest.mark.parametrize("written", ["auto", "{auto: true}"])
def test_an_interval_that_is_not_given_is_auto_and_left_to_the_trainer(written: str) -> None:
    """An earlier trainer has a default of its own, and refuses a word that it does not know."""
    unnamed = load_text(JOB, source="job.yaml")
    named = load_text(f"{JOB}    checkpoint: {{every: {written}}}\n", source="job.yaml")
    for job in (unnamed, named):
        assert job.spec.train is not None
        assert job.spec.train.checkpoint.every.auto is True
    train = unnamed.to_train_config().to_document()["train"]
    assert "every" not in train["checkpoint"]
    assert load_text(json.dumps(unnamed.to_document()), source="again") == unnamed
    assert named.to_train_config().to_document()["train"]["checkpoint"]["every"] == {
        "auto": True,
        "seconds": None,
        "steps": None,
    }


def test_an_interval_that_is_given_is_written_as_earlier_trainers_read_it() -> None:
    text = f"{JOB}    checkpoint: {{every: {{seconds: 60}}}}\n"
    train = load_text(text, source="job.yaml").to_train_config().to_document()["train"]
    assert train["checkpoint"]["every"] == {"seconds": 60, "steps": None}


@pytest.mark.parametrize(
    ("written", "document"),
    [("5", 5), ("{last: 5}", 5), ("{every: 9}", {"last": 3, "best": None, "every": 9})],
)
def test_what_is_kept_is_written_as_a_number_if_that_says_all(
    written: str, document: object
) -> None:
    """An earlier trainer knows no mapping there."""
    job = load_text(f"{JOB}    checkpoint: {{keep: {written}}}\n", source="job.yaml")
    assert job.to_train_config().to_document()["train"]["checkpoint"]["keep"] == document
    assert load_text(json.dumps(job.to_document()), source="again") == job


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.path)
def test_a_field_is_camel_case_and_its_description_is_a_sentence(field: reference.Field) -> None:
    assert re.fullmatch(r"[a-z][a-zA-Z0-9]*", field.name)
    assert field.description.endswith(".")
    assert field.description[0].isupper() or any(
        field.description.startswith(choice) for choice in field.choices
    )


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.path)
def test_a_field_is_no_boolean_and_every_number_list_and_mapping_is_bounded(
    field: reference.Field,
) -> None:
    for form in field.forms:
        kind = form.get("type")
        # tools patch `suspend` of a Job, JobSet or TrainJob, where it is a boolean; what can only
        # be true chooses one of several fields
        assert kind != "boolean" or field.path == "spec.suspend" or form.get("const") is True
        if kind == "integer":
            assert {"minimum", "maximum"} <= set(form)
        if kind == "array":
            assert "maxItems" in form
        if kind == "object" and "properties" not in form:
            assert "maxProperties" in form
        if kind == "string" and not {"enum", "const"} & set(form):
            assert "maxLength" in form


@pytest.mark.parametrize("field", SECONDS, ids=lambda field: field.path)
def test_seconds_are_whole_numbers_of_at_most_a_year(field: reference.Field) -> None:
    (form,) = field.forms
    assert form["type"] == "integer"
    assert form["maximum"] == 31_536_000


def test_a_job_cannot_be_changed(smallest: TrainingJob) -> None:
    with pytest.raises(ValidationError):
        smallest.metadata.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "read"),
    [("2", "2"), ("0.5", "0.5"), ('"500m"', "500m"), ("500m", "500m"), ("1.5", "1.5")],
)
def test_cores_are_read_as_kubernetes_reads_them(written: str, read: str) -> None:
    text = f"{JOB}  resources: {{cpu: {written}}}\n"
    assert load_text(text, source="job.yaml").spec.resources.cpu == read


@pytest.mark.parametrize(
    "lines",
    [
        "  checkpoints: {claim: ckpt}",
        "  checkpoints: {size: 10Gi}",
        "  checkpoints: {size: 10Gi, class: fast, accessMode: ReadWriteOnce}",
        "  checkpoints: {path: ./ckpt}",
        "  checkpoints: {url: 's3://bucket'}",
        "  checkpoints: {url: 's3://my.bucket_1/a-team/runs=2/', region: eu-central-1}",
        "  checkpoints: {url: 's3://b-1/runs', endpoint: 'https://minio.example.com', secret: key}",
        "  checkpoints: {url: 's3://team/runs', endpoint: 'http://[fd00::1]:9000/store'}",
        "  checkpoints: {url: 'gs://bucket/runs', secret: keys}",
        "  checkpoints: {url: 'az://container', endpoint: 'http://127.0.0.1:10000/account'}",
        "  data: [{claim: photos, path: ./photos, mountPath: /data}]",
        "  data: [{claim: a, mountPath: /data}, {claim: b, mountPath: /data2}]",
        (
            "  env: [{name: WANDB_MODE, value: offline}, {name: TOKEN, secret: {name: tokens, "
            "key: hub.txt}}]"
        ),
        "  tolerations: [{operator: Exists}, {key: gpu, value: a100, effect: NoSchedule}]",
        "  nodeSelector: {topology.kubernetes.io/zone: eu-1a, disk: ssd}",
        (
            "  podTemplate: {spec: {containers: [{name: trainer, stdin: true, ports: "
            "[{containerPort: 80}]}]}}"
        ),
        "  image: registry.example.com:5000/team/trainer@sha256:" + "0" * 64,
        "  procsPerNode: 4\n  resources: {gpu: 8}",
        "  nodes: 4\n  procsPerNode: auto",
    ],
)
def test_what_the_design_shows_is_valid(lines: str) -> None:
    assert load_text(f"{JOB}{lines}\n", source="job.yaml").metadata.name == "digits"


@pytest.mark.parametrize("workload", ["digits", "gpt", "my_models.vision:Net", "m:N"])
def test_a_workload_is_shipped_or_a_class(workload: str) -> None:
    train = load_text(
        JOB.replace("workload: digits", f"workload: {workload}"), source="job.yaml"
    ).spec.train
    assert train is not None
    assert train.workload == workload


def test_a_script_with_arguments_is_valid() -> None:
    text = (
        JOB.split("  train:", maxsplit=1)[0]
        + '  script: {path: train.py, args: [--lr, "0.1", no]}\n'
    )
    script = load_text(text, source="job.yaml").to_train_config().script
    assert script is not None
    assert script.args == ["--lr", "0.1", "no"]


def test_plain_values_reach_the_workload_as_they_are() -> None:
    text = JOB.replace("workload: digits", "workload: a:B")
    text += "    options: {deep: [{a: null, b: [1, 2.5, yes, 012, 2026-01-01]}], 1: one}\n"
    train = load_text(text, source="job.yaml").spec.train
    assert train is not None
    options: dict[str, Any] = dict(train.options)
    assert options == {"deep": [{"a": None, "b": [1, 2.5, "yes", 12, "2026-01-01"]}], "1": "one"}


def test_a_job_may_say_all_of_this() -> None:
    text = """
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits, namespace: ml, labels: {team: vision}, \
annotations: {example.com/why: "a: b"}}
spec:
  backend: auto
  image: registry/kdist-trainer:0.2.0.dev0
  nodes: {min: 1, max: 4}
  procsPerNode: 1
  threadsPerRank: 1
  resources: {cpu: 2, memory: 4Gi, gpu: 1}
  code: ./src
  data: [{claim: imagenet, mountPath: /data}]
  checkpoints: {claim: ckpt}
  env: [{name: WANDB_MODE, value: offline}, {name: TOKEN, secret: {name: s, key: k}}]
  maxRestarts: 10
  queue: team-a
  rendezvous: auto
  nodeSelector: {}
  tolerations: []
  imagePullSecrets: [registry]
  priorityClass: high
  terminationGracePeriodSeconds: 60
  ttlSecondsAfterFinished: 86400
  podTemplate: {}
  train:
    workload: digits
    epochs: 5
    globalBatch: 256
    virtualShards: 4
    strategy: ddp
    precision: fp32
    checkpoint: {every: {seconds: 300}, mode: async, keep: 3}
"""
    job = load_text(text, source="job.yaml")
    assert job.metadata.annotations == {"example.com/why": "a: b"}
    assert job.spec.env[1].secret is not None
    assert job.spec.env[1].secret.key == "k"


@pytest.mark.parametrize(
    ("betas", "valid"),
    [("[0, 0.999]", True), ('["0.9", 0.99]', False), ("[yes, no]", False), ("0.9", False)],
)
def test_betas_are_two_numbers(betas: str, valid: bool) -> None:
    text = f"{JOB}    optimizer: {{betas: {betas}}}\n"
    if valid:
        assert load_text(text, source="job.yaml").spec.train is not None
    else:
        with pytest.raises(InvalidJobError, match=r"spec.train.optimizer.betas(\[0\])?: must be"):
            load_text(text, source="job.yaml")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("  nodes: {min: 1, max: 4}\n  replicas: 8", "must be from nodes.min, 1, to nodes.max, 4"),
        ("  nodes: {min: 2, max: 4}\n  replicas: 1", "must be from nodes.min, 2, to nodes.max, 4"),
        ("  nodes: 2\n  replicas: 3", "must be 2, as nodes is one number: change nodes"),
        ("  suspend: 'true'", "must be true or false, found the text `true`"),
        ("  restartedAt: now", "must be a time such as `2026-05-01T12:00:00Z`"),
        ("  restartedAt: '2026-02-31T12:00:00Z'", "must be a time: day is out of range for month"),
        ("  code: {configmap: mine}", "did you mean `configMap`"),
        ("  code: {path: src, configMap: mine}", "one of path, configMap, claim and url"),
        ("  code: {claim: mine, url: 'hf://a/b'}", "one of path, configMap, claim and url"),
        ("  code: {configMap: mine, subPath: src}", "is a path in a claim"),
        ("  code: {claim: mine, subPath: a/../b}", "must not contain `..`"),
        ("  code: {claim: mine, subPath: /a}", "must be a relative path"),
        ("  code: {claim: mine, size: 1Gi}", "needs url"),
        ("  checkpoints: {claim: mine, reclaimPolicy: Delete}", "it needs size"),
    ],
)
def test_a_state_that_cannot_be_wanted_is_refused(lines: str, message: str) -> None:
    with pytest.raises(InvalidJobError) as raised:
        load_text(f"{JOB}{lines}\n", source="job.yaml")
    (problem,) = raised.value.problems
    assert message in problem.sentence


@pytest.mark.parametrize("time", ["2026-05-01T12:00:00Z", "2026-05-01T12:00:00.123456789+02:00"])
def test_a_restart_is_asked_for_with_the_time_that_kubernetes_writes(time: str) -> None:
    job = load_text(f"{JOB}  restartedAt: {time}\n", source="job.yaml")
    assert job.spec.restarted_at == time


def test_a_folder_of_code_is_written_as_earlier_versions_read_it() -> None:
    job = load_text(f"{JOB}  code: {{path: ./src}}\n", source="job.yaml")
    assert job == load_text(f"{JOB}  code: ./src\n", source="job.yaml")
    assert job.to_document()["spec"]["code"] == "./src"
