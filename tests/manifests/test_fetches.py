"""A job with data and weights by URL: an init container for each fetches it into a volume of the
pod, with no more rights, resources and secrets than it needs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist import backends
from kdist.errors import KdistError
from kdist.render import find_pods, warn
from kdist.render.overlay import violations
from kdist.spec import list_sources
from tests.manifests.jobs import IMAGE, make, place

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
DIGEST = "0123456789abcdef" * 4
SPEECH = {
    "url": "s3://team-data/speech",
    "mountPath": "/data",
    "secret": "store",
    "endpoint": "http://minio.storage:9000",
    "region": "eu-1",
    "size": "200Gi",
}
NOISE = {"url": "https://example.com/noise.tar", "mountPath": "/noise", "sha256": DIGEST}
CLAIM = {"claim": "images", "mountPath": "/images"}
TMP = "/tmp"  # noqa: S108 - in the pod
TRAIN = {"workload": "digits", "epochs": 1}
WEIGHTS = {**TRAIN, "init": {"url": "hf://owner/model@v1", "secret": "hub-token"}}


def find_pod(backend: str = "job", **spec: Any) -> dict[str, Any]:
    found = [pod for each in place(make(**spec), backend) for pod in find_pods(each.document)]
    (pod,) = found
    return dict(pod["spec"])


def find_variables(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in container["env"]}


@KINDS
def test_each_source_has_an_init_container_and_the_training_finds_its_files(backend: str) -> None:
    pod = find_pod(backend, data=[SPEECH, CLAIM, NOISE], train=WEIGHTS)
    names = [each["name"] for each in pod["initContainers"]]
    assert names == ["fetch-data-0", "fetch-data-2", "fetch-init"]
    speech, noise, weights = pod["initContainers"]
    assert speech["args"] == [
        "--url=s3://team-data/speech",
        "--field=spec.data[0]",
        "--endpoint=http://minio.storage:9000",
        "--region=eu-1",
        f"--max-bytes={200 * 1024**3}",
        "--folder=/fetch",
        "--termination-message=/dev/termination-log",
    ]
    assert f"--sha256={DIGEST}" in noise["args"]
    assert "--weights" in weights["args"]
    assert "--weights" not in noise["args"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["data-0"]["emptyDir"] == {"sizeLimit": f"{200 * 17 * 64}Mi"}
    assert volumes["data-1"]["persistentVolumeClaim"]["claimName"] == "images"
    assert volumes["init"]["emptyDir"] == {"sizeLimit": f"{10 * 17 * 64}Mi"}
    (container,) = pod["containers"]
    assert {"--data=/data=/data", "--init=/run/kdist-init"} <= set(container["args"])
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    read = {"subPath": "files", "readOnly": True}
    assert mounts["/data"] == {"name": "data-0", "mountPath": "/data", **read}
    assert mounts["/run/kdist-init"] == {"name": "init", "mountPath": "/run/kdist-init", **read}
    assert mounts["/images"] == {"name": "data-1", "mountPath": "/images", "readOnly": True}
    for each in pod["initContainers"]:
        own = {mount["mountPath"] for mount in each["volumeMounts"]}
        assert own == {"/fetch", TMP}


@KINDS
def test_the_container_that_fetches_has_the_image_and_the_restrictions_of_the_training(
    backend: str,
) -> None:
    gpus = {"cpu": "4", "memory": "16Gi", "gpu": 2}
    job = make(data=[SPEECH], train=WEIGHTS, resources=gpus)
    template = next(pod for each in place(job, backend) for pod in find_pods(each.document))
    assert violations(template) == []
    (container,) = template["spec"]["containers"]
    for each in template["spec"]["initContainers"]:
        same = ("image", "imagePullPolicy", "securityContext", "terminationMessagePath")
        assert {name: each[name] for name in same} == {name: container[name] for name in same}
        assert each["image"] == IMAGE
        limits = {"cpu": "4", "memory": "16Gi"}
        assert each["resources"] == {"requests": limits, "limits": limits}, "the pod asks no more"
        assert "restartPolicy" not in each


def test_credentials_are_given_to_the_container_that_fetches_with_them_and_to_no_other() -> None:
    env = [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    pod = find_pod(data=[SPEECH, NOISE], train=WEIGHTS, env=env)
    speech, noise, weights = map(find_variables, pod["initContainers"])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        reference = {"name": "store", "key": name, "optional": True}
        assert speech[name]["valueFrom"] == {"secretKeyRef": reference}
    assert weights["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub-token"
    assert "secretKeyRef" not in json.dumps(noise)
    assert "HF_TOKEN" not in speech
    assert all(each["HTTPS_PROXY"]["value"] == "http://proxy:3128" for each in (speech, noise))
    assert "secretKeyRef" not in json.dumps(pod["containers"])
    hidden = make(data=[NOISE], train=WEIGHTS).to_train_config().secret_variables
    assert set(hidden) == {"HTTP_AUTHORIZATION", "HF_TOKEN"}


def find_egress(**spec: Any) -> list[dict[str, Any]]:
    """What the sources add to the addresses that every job may reach."""

    def find(spec: dict[str, Any], backend: str) -> list[dict[str, Any]]:
        (policy,) = [each for each in place(make(**spec), backend) if each.kind == "NetworkPolicy"]
        return list(policy.document["spec"]["egress"])

    def add(backend: str) -> list[dict[str, Any]]:
        usual = find({}, backend)
        return [each for each in find(spec, backend) if each not in usual]

    found = add("job")
    assert all(add(backend) == found for backend in backends.NAMES)
    return found


def open_port(number: int) -> dict[str, Any]:
    return {"ports": [{"port": number, "protocol": "TCP"}]}


def test_the_port_of_every_server_is_open_once() -> None:
    web = {"url": "http://files.example.com:8000/a.tar", "mountPath": "/a"}
    hub = {**TRAIN, "init": {"url": "hf://owner/model@v1", "endpoint": "http://hub:8080"}}
    checkpoints = {"url": "s3://runs", "endpoint": "http://minio.storage:9000", "secret": "store"}
    egress = find_egress(data=[SPEECH, web, NOISE], train=hub, checkpoints=checkpoints)
    assert egress == [open_port(9000), open_port(8000), open_port(8080)]


def test_a_server_at_port_80_does_not_open_the_way_to_the_credentials_of_the_machine() -> None:
    (rule,) = find_egress(data=[{"url": "http://files.example.com/a.tar", "mountPath": "/a"}])
    assert rule["ports"] == [{"port": 80, "protocol": "TCP"}]
    blocks = [each["ipBlock"]["cidr"] for each in rule["to"] if "ipBlock" in each]
    assert blocks == ["0.0.0.0/0", "::/0"]


def test_a_bucket_that_is_read_with_the_pods_own_identity_opens_the_way_to_it() -> None:
    own = {"url": "s3://team-data/speech", "mountPath": "/data"}
    (rule,) = find_egress(data=[own])
    assert rule["to"] == [{"ipBlock": {"cidr": "169.254.170.23/32"}}]
    assert find_egress(data=[own | {"secret": "store"}]) == []
    assert find_egress(data=[NOISE], train=WEIGHTS) == []


@pytest.mark.parametrize("backend", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("nodes", [2, {"min": 1, "max": 2}])
def test_a_source_that_is_not_what_it_should_be_ends_the_job(backend: str, nodes: Any) -> None:
    manifests = place(make(data=[SPEECH, NOISE], train=WEIGHTS, nodes=nodes), backend)
    text = json.dumps([each.document for each in manifests])
    (policy,) = [policy for each in manifests for policy in find_all(each.document, "podFail")]
    rules = policy["rules"]
    assert len(rules) <= 20, "Kubernetes takes no more"
    by_name = {
        rule["onExitCodes"]["containerName"]: (index, rule)
        for index, rule in enumerate(rules)
        if "onExitCodes" in rule and rule["action"] == "FailJob"
    }
    patterns = []
    for name in ("fetch-data-0", "fetch-data-1", "fetch-init"):
        index, rule = by_name[name]
        assert {64, 65} <= set(rule["onExitCodes"]["values"])
        assert not {200, 203} & set(rule["onExitCodes"]["values"])
        patterns.append(f"rule at index {index}$")
    if backend != "job" and nodes == 2:
        assert all(json.dumps(pattern) in text for pattern in patterns), "the JobSet fails, too"


def find_all(document: Any, key: str) -> list[Any]:
    if isinstance(document, dict):
        own = [value for name, value in document.items() if name.startswith(key)]
        return own + [each for value in document.values() for each in find_all(value, key)]
    if isinstance(document, list):
        return [each for value in document for each in find_all(value, key)]
    return []


@KINDS
def test_no_job_has_more_rules_for_exit_codes_than_kubernetes_takes(backend: str) -> None:
    data = [{"url": f"s3://bucket/{each}", "mountPath": f"/data/{each}"} for each in range(15)]
    job = make(data=data, train=WEIGHTS)
    assert len(list_sources(job.spec)) == 16
    policies = [each for one in place(job, backend) for each in find_all(one.document, "podFail")]
    assert all(len(each["rules"]) == 19 for each in policies)


def test_a_job_without_urls_has_no_init_container() -> None:
    pod = find_pod(data=[CLAIM], train={**TRAIN, "init": {"path": "/images/model.safetensors"}})
    assert "initContainers" not in pod
    assert not any("--init" in argument for argument in pod["containers"][0]["args"])


def test_data_that_is_only_on_this_machine_is_refused_and_a_path_next_to_a_url_is_not_sent() -> (
    None
):
    with pytest.raises(KdistError, match="add the claim with the data on the cluster, or its url"):
        place(make(data=[{"path": "here", "mountPath": "/data"}]))
    pod = find_pod(data=[NOISE | {"path": "./noise"}])
    assert [each["name"] for each in pod["initContainers"]] == ["fetch-data-0"]


def test_the_overlay_may_add_to_a_container_that_fetches_but_not_change_what_it_does() -> None:
    def overlay(**change: Any) -> dict[str, Any]:
        return {"spec": {"initContainers": [{"name": "fetch-data-0", **change}]}}

    env = [{"name": "SSL_CERT_FILE", "value": "/certs/ca.crt"}]
    found = find_pod(data=[NOISE], podTemplate=overlay(env=env))
    assert "SSL_CERT_FILE" in find_variables(found["initContainers"][0])
    with pytest.raises(KdistError, match="must not change the args of fetch-data-0"):
        place(make(data=[NOISE], podTemplate=overlay(args=["--url=s3://other"])))
    other = {"spec": {"volumes": [{"name": "data-0", "emptyDir": {"medium": "Memory"}}]}}
    volumes = find_pod(data=[NOISE], podTemplate=other)["volumes"]
    (volume,) = [each for each in volumes if each["name"] == "data-0"]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_the_overlays_resources_of_the_training_are_those_of_a_fetch_too() -> None:
    gpu = {"nvidia.com/gpu": "1"}
    less = {"requests": {"cpu": "100m", **gpu}, "limits": {"memory": "5Gi", **gpu}}
    trainer = {"containers": [{"name": "trainer", "resources": less}]}
    for backend in backends.NAMES:
        (fetch,) = find_pod(backend, data=[NOISE], podTemplate={"spec": trainer})["initContainers"]
        assert fetch["resources"]["requests"] == {"cpu": "100m", "memory": "4Gi"}
        assert fetch["resources"]["limits"] == {"cpu": "1", "memory": "5Gi"}
    own = {"initContainers": [{"name": "fetch-data-0", "resources": {"limits": {"cpu": "2"}}}]}
    (fetch,) = find_pod(data=[NOISE], podTemplate={"spec": {**trainer, **own}})["initContainers"]
    assert fetch["resources"]["limits"]["cpu"] == "2"


def test_what_the_overlay_gives_the_training_to_reach_a_server_a_fetch_gets_too() -> None:
    mount = {"name": "authorities", "mountPath": "/etc/authorities", "readOnly": True}
    env = [{"name": "REQUESTS_CA_BUNDLE", "value": "/etc/authorities/ca.crt"}]
    other = [{"name": "own", "image": "other/image:1"}]
    overlay = {
        "volumes": [{"name": "authorities", "configMap": {"name": "company-ca"}}],
        "containers": [{"name": "trainer", "volumeMounts": [mount], "env": env}],
        "initContainers": other,
    }
    for backend in backends.NAMES:
        pod = find_pod(backend, data=[NOISE, CLAIM], podTemplate={"spec": overlay})
        fetch, own = pod["initContainers"]
        assert mount in fetch["volumeMounts"]
        assert env[0] in fetch["env"]
        assert [each["mountPath"] for each in fetch["volumeMounts"][:-1]] == ["/fetch", TMP]
        assert own == other[0]


def test_a_repository_that_may_change_is_worth_a_warning() -> None:
    moving = {**TRAIN, "init": {"url": "hf://owner/model"}}
    job = make(train=moving, data=[SPEECH])
    placement = backends.Placement("job", "kubernetes", "c0ffee00")
    (warning,) = [each for each in warn(job, placement) if "revision" in each]
    assert warning.startswith("spec.train.init.url names no revision")
    assert not [each for each in warn(make(train=WEIGHTS), placement) if "revision" in each]
    operator = backends.Placement("pytorchjob", "kubernetes", "c0ffee00")
    assert any("exit codes of init containers" in each for each in warn(job, operator))
