"""A job with its checkpoints in a bucket: its pods are told where that is, get the credentials from
a Secret, mount nothing, and reach the server.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist import backends
from kdist.render import find_pods
from kdist.render.text import to_yaml
from tests.manifests.jobs import make, place

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
SERVER = {"url": "s3://bucket/runs/", "endpoint": "http://minio.storage:9000", "region": "eu-1"}
SECRET = {"secret": "store"}
NAMES = {
    "s3": ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"],
    "gs": ["GOOGLE_SERVICE_ACCOUNT_KEY"],
    "az": ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"],
}


def find_pod(backend: str = "job", **spec: Any) -> dict[str, Any]:
    (pod,) = [each for one in place(make(**spec), backend) for each in find_pods(one.document)]
    return dict(pod["spec"])


def find_variables(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (container,) = pod["containers"]
    return {each["name"]: each for each in container["env"]}


@KINDS
def test_the_agent_is_told_where_its_bucket_is_and_mounts_nothing_for_it(backend: str) -> None:
    pod = find_pod(backend, checkpoints=SERVER)
    (container,) = pod["containers"]
    assert "--checkpoints=s3://bucket/runs/digits" in container["args"]
    variables = find_variables(pod)
    assert variables["KDIST_CHECKPOINTS_ENDPOINT"]["value"] == "http://minio.storage:9000"
    assert variables["KDIST_CHECKPOINTS_REGION"]["value"] == "eu-1"
    assert not [name for name in variables if name.startswith("AWS_")], "the pod's identity is used"
    without = find_pod(backend)
    assert pod["volumes"][1:] == without["volumes"][1:]
    assert container["volumeMounts"] == without["containers"][0]["volumeMounts"]
    kinds = {each.kind for each in place(make(checkpoints=SERVER), backend)}
    assert "PersistentVolumeClaim" not in kinds


@KINDS
@pytest.mark.parametrize("scheme", NAMES)
def test_the_credentials_are_taken_from_those_keys_of_the_secret_that_it_has(
    backend: str, scheme: str
) -> None:
    given = {"url": f"{scheme}://bucket", "secret": "store"}
    variables = find_variables(find_pod(backend, checkpoints=given))
    for name in NAMES[scheme]:
        reference = {"name": "store", "key": name, "optional": True}
        assert variables.pop(name)["valueFrom"] == {"secretKeyRef": reference}
    assert "store" not in json.dumps(variables)
    assert "KDIST_CHECKPOINTS_ENDPOINT" not in variables


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("secret", ["store", None])
def test_values_of_credentials_are_kept_out_of_the_logs_wherever_they_come_from(
    scheme: str, secret: str | None
) -> None:
    job = make(
        checkpoints={"url": f"{scheme}://bucket", "secret": secret},
        env=[{"name": "TOKEN", "secret": {"name": "s", "key": "k"}}],
    )
    hidden = [name for name in NAMES[scheme] if name != "AZURE_STORAGE_ACCOUNT_NAME"]
    assert job.to_train_config().secret_variables == ["TOKEN", *hidden]


def test_a_credential_that_the_file_takes_from_a_secret_by_itself_is_named_once() -> None:
    key = {"name": "AWS_SECRET_ACCESS_KEY", "secret": {"name": "s", "key": "k"}}
    names = make(checkpoints={"url": "s3://runs"}, env=[key]).to_train_config().secret_variables
    assert sorted(names) == sorted(NAMES["s3"])


def test_each_run_has_its_own_prefix_in_the_bucket() -> None:
    annotations = {"kdist.dev/run": "second"}
    job = make({"metadata": {"name": "digits", "annotations": annotations}}, checkpoints=SERVER)
    assert "--checkpoints=s3://bucket/runs/digits@second" in to_yaml(place(job), annotate=False)


def test_the_lines_of_the_bucket_name_their_fields() -> None:
    text = to_yaml(place(make(checkpoints={**SERVER, "secret": "store"})), annotate=True)
    for line in (
        "--checkpoints=s3://bucket/runs/digits  # spec.checkpoints",
        "value: http://minio.storage:9000  # spec.checkpoints.endpoint",
        "value: eu-1  # spec.checkpoints.region",
        "name: store  # spec.checkpoints.secret",
        "port: 9000  # spec.checkpoints.endpoint",
    ):
        assert line in text


def find_egress(**checkpoints: Any) -> list[dict[str, Any]]:
    """What the bucket adds to the addresses that every job may reach."""

    def find(spec: dict[str, Any]) -> list[dict[str, Any]]:
        (policy,) = [each for each in place(make(**spec)) if each.kind == "NetworkPolicy"]
        return list(policy.document["spec"]["egress"])

    usual = find({})
    found = find({"checkpoints": checkpoints})
    assert [each for each in found if each in usual] == usual
    return [each for each in found if each not in usual]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://minio.storage:9000", 9000),
        ("https://[fd00::1]:7443/store", 7443),
        ("https://minio.example.com", None),
        ("https://minio.example.com:8443", None),
    ],
)
def test_the_port_of_the_server_is_open(endpoint: str, port: int | None) -> None:
    rules = [] if port is None else [{"ports": [{"port": port, "protocol": "TCP"}]}]
    assert find_egress(url="s3://bucket", endpoint=endpoint) == rules


def test_a_server_at_port_80_does_not_open_the_way_to_the_credentials_of_the_machine() -> None:
    (rule,) = find_egress(url="s3://bucket", endpoint="http://minio.storage", **SECRET)
    assert rule["ports"] == [{"port": 80, "protocol": "TCP"}]
    blocks = [each["ipBlock"] for each in rule["to"] if "ipBlock" in each]
    assert [(each["cidr"], "169.254.0.0/16" in each["except"]) for each in blocks] == [
        ("0.0.0.0/0", True),
        ("::/0", False),
    ]


def test_only_a_pod_that_uses_its_own_identity_reaches_the_agent_that_gives_it() -> None:
    agent = {"to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}]}
    assert find_egress(url="s3://runs") == [{**agent, "ports": [{"port": 80, "protocol": "TCP"}]}]
    assert find_egress(url="s3://runs", **SECRET) == []
    assert find_egress(url="gs://runs") == find_egress(url="az://runs") == []
