"""What every cluster refuses of a pod is refused with its place in podTemplate; nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kdist import backends
from kdist.errors import InvalidJobError, KdistError
from kdist.job_file import load_text
from kdist.render import Placement, find_pod_problems, warn
from kdist.spec.reference import show
from tests.cli.conftest import Kdist
from tests.cli.conftest import kdist as kdist
from tests.manifests import jobs
from tests.manifests.jobs import EXAMPLES, FULL, IMAGE, load, make, place


def in_trainer(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", **fields}]}


def in_context(**fields: Any) -> dict[str, Any]:
    return in_trainer(securityContext=fields)


LIMITS = "containers[0].resources.limits"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        in_context(privileged=True),
        "containers[0].securityContext.privileged",
        "add allowPrivilegeEscalation: true",
    ),
    (
        in_context(capabilities={"add": ["CAP_SYS_ADMIN"]}),
        "containers[0].securityContext.capabilities.add",
        "must not have CAP_SYS_ADMIN",
    ),
    (
        in_context(runAsUser=0),
        "containers[0].securityContext.runAsUser",
        "add runAsNonRoot: false",
    ),
    ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser", "no node starts the"),
    (
        in_context(seccompProfile={"localhostProfile": "a.json"}),
        "containers[0].securityContext.seccompProfile.localhostProfile",
        "needs localhostProfile if its type is Localhost",
    ),
    (
        {"securityContext": {"seccompProfile": {"type": "Localhost"}}},
        "securityContext.seccompProfile.type",
        "needs localhostProfile",
    ),
    (
        in_trainer(resources={"limits": {"cpu": "500m"}}),
        f"{LIMITS}.cpu",
        "found requests 1 and limits 500m; spec.resources.cpu sets both",
    ),
    (
        in_trainer(resources={"requests": {"memory": "5Gi"}}),
        "containers[0].resources.requests.memory",
        "found requests 5Gi and limits 4Gi",
    ),
    (
        in_trainer(resources={"requests": {"amd.com/gpu": "1"}}),
        'containers[0].resources.requests["amd.com/gpu"]',
        "a request and a limit of amd.com/gpu that are equal",
    ),
    (in_trainer(resources={"limits": {"cpu": "2 cores"}}), f"{LIMITS}.cpu", "must be a quantity"),
    (
        in_trainer(resources={"claims": [{"name": "gpus"}]}),
        "containers[0].resources.claims",
        "there is no claim gpus in podTemplate.spec.resourceClaims",
    ),
    (
        in_trainer(env=[{"name": "TOKEN", "value": "x"}]),
        "containers[0].env[0].value",
        "found valueFrom and value: add valueFrom: null",
    ),
    (
        in_trainer(volumeMounts=[{"name": "data", "mountPath": "/data"}]),
        "containers[0].volumeMounts[0].name",
        "there is no volume data: add it to podTemplate.spec.volumes",
    ),
    (
        in_trainer(livenessProbe={"exec": {"command": ["true"]}}),
        "containers[0].livenessProbe.exec",
        "found httpGet and exec: add httpGet: null, or remove exec",
    ),
    (
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/scratch"}}]},
        "volumes[0].hostPath",
        "found emptyDir and hostPath",
    ),
    ({"initContainers": [{"name": "setup"}]}, "initContainers[0]", "needs an image"),
]
TOKEN = [{"name": "TOKEN", "secret": {"name": "s", "key": "k"}}]


@pytest.mark.parametrize(("spec", "path", "message"), REFUSED, ids=[path for _, path, _ in REFUSED])
def test_what_every_cluster_refuses_is_named_with_its_place(
    spec: dict[str, Any], path: str, message: str
) -> None:
    for backend in backends.NAMES:
        job = make(podTemplate={"spec": spec}, env=TOKEN, backend=backend)
        ((found, text, _),) = find_pod_problems(job)
        assert show(found) == f"spec.podTemplate.spec.{path}"
        assert message in text
        with pytest.raises(KdistError) as error:
            place(job, backend)
        assert f"{show(found)}: {text}" in error.value.message


ALLOWED: list[dict[str, Any]] = [
    in_context(privileged=True, allowPrivilegeEscalation=True),
    in_context(privileged=True, allowPrivilegeEscalation=None),
    in_context(runAsUser=0, runAsNonRoot=False),
    in_context(capabilities={"add": ["SYS_ADMIN"]}),
    in_trainer(resources={"requests": {"cpu": "50m"}, "limits": {"memory": "8Gi"}}),
    in_trainer(resources={"limits": {"rdma/hca": "1"}}),
    in_trainer(resources={"limits": None, "requests": {"cpu": "8"}}),
    in_trainer(env=[{"name": "TOKEN", "value": "x", "valueFrom": None}]),
    in_trainer(livenessProbe={"exec": {"command": ["true"]}, "httpGet": None}),
    {"volumes": [{"name": "tmp", "emptyDir": None, "hostPath": {"path": "/scratch"}}]},
    {
        "volumes": [{"name": "more", "hostPath": {"path": "/more"}}],
        **in_trainer(volumeMounts=[{"name": "more", "mountPath": "/more"}]),
    },
    {
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}],
        **in_trainer(resources={"claims": [{"name": "gpus"}]}),
    },
    {"initContainers": [{"name": "setup", "image": "a"}]},
]


@pytest.mark.parametrize("spec", ALLOWED, ids=str)
def test_what_a_cluster_may_take_is_rendered(spec: dict[str, Any]) -> None:
    for backend in backends.NAMES:
        job = make(podTemplate={"spec": spec}, env=TOKEN, backend=backend)
        assert find_pod_problems(job) == []
        assert place(job, backend)


def test_the_examples_and_a_job_without_an_image_have_no_such_problem() -> None:
    for job in [*map(jobs.example, EXAMPLES.values()), load(FULL)]:
        assert find_pod_problems(job) == []
    bare = FULL["spec"] | {"image": None}
    assert find_pod_problems(load_text(json.dumps(FULL | {"spec": bare}), source="test")) == []


def test_validate_shows_the_line_and_the_column(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"""\
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata: {{name: digits}}
spec:
  image: {IMAGE}
  backend: pytorchjob
  train: {{workload: digits, epochs: 1}}
  podTemplate:
    spec:
      containers:
        - {{name: proxy, image: proxy}}
        - name: trainer
          securityContext: {{runAsUser: 0, privileged: true}}
"""
    Path("job.yaml").write_text(text)
    refused = kdist("validate", "job.yaml")
    place = "spec.podTemplate.spec.containers[1].securityContext"
    assert refused.exit_code == 2
    assert f"job.yaml:13:40: {place}.runAsUser: must not be 0" in refused.stderr
    assert f"job.yaml:13:55: {place}.privileged: must not be true" in refused.stderr
    assert refused.stderr.endswith("Next: kdist explain spec.podTemplate\n")
    Path("job.yaml").write_text(
        text.partition("      containers")[0] + "      restartPolicy: Never"
    )
    refused = kdist("validate", "job.yaml")
    assert "job.yaml:8:3: spec.podTemplate: must not change spec.restartPolicy" in refused.stderr


NAMES = st.sampled_from(["trainer", "a", "tmp", "config", "fetch-0", "name", "spec", "KDIST_X"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70000) | st.floats() | st.text(max_size=6),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3),
    max_leaves=5,
)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with some of the fields, of which each may also be anything."""
    return st.fixed_dictionaries({}, optional={key: each | ANY for key, each in fields.items()})


def many(each: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(each | ANY, max_size=2)


PROBE = some(exec=some(command=many(ANY)), httpGet=some(port=ANY, host=ANY), tcpSocket=ANY)
CONTEXT = some(
    runAsUser=st.integers(0, 2),
    runAsNonRoot=st.booleans(),
    privileged=st.booleans(),
    capabilities=some(add=many(st.just("SYS_ADMIN")), drop=many(st.just("ALL"))),
    seccompProfile=some(type=st.just("Localhost"), localhostProfile=ANY),
    appArmorProfile=some(type=ANY),
    seLinuxOptions=some(type=ANY, user=ANY),
    windowsOptions=some(hostProcess=ANY),
    sysctls=many(some(name=ANY)),
)
QUANTITIES = st.dictionaries(st.sampled_from(["cpu", "memory", "a.b/c"]), ANY, max_size=2)
CONTAINER = some(
    name=NAMES,
    image=st.just(IMAGE),
    args=many(ANY),
    env=many(some(name=NAMES, value=ANY, valueFrom=ANY)),
    envFrom=many(ANY),
    resources=some(limits=QUANTITIES, requests=QUANTITIES, claims=many(some(name=NAMES))),
    volumeMounts=many(some(name=NAMES, mountPath=st.sampled_from(["/a", "/b"]))),
    ports=many(some(containerPort=ANY, name=NAMES, hostPort=ANY)),
    securityContext=CONTEXT,
    livenessProbe=PROBE,
    lifecycle=some(preStop=PROBE, postStart=PROBE),
)
OVERLAY = some(
    metadata=some(labels=ANY, annotations=st.dictionaries(NAMES, ANY, max_size=2)),
    spec=some(
        containers=many(CONTAINER),
        initContainers=many(CONTAINER),
        volumes=many(some(name=NAMES, emptyDir=ANY, hostPath=ANY)),
        securityContext=CONTEXT,
        affinity=some(podAntiAffinity=ANY, nodeAffinity=ANY),
        tolerations=many(ANY),
        topologySpreadConstraints=many(some(topologyKey=NAMES)),
        imagePullSecrets=many(some(name=NAMES)),
        resourceClaims=many(some(name=NAMES)),
        hostAliases=many(ANY),
        os=some(name=ANY),
        nodeName=ANY,
        restartPolicy=ANY,
    ),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[*HealthCheck])
@given(OVERLAY, st.sampled_from(backends.NAMES))
@example({"spec": {"containers": None}}, "job")
@example({"spec": {"volumes": [None]}}, "job")
@example({"spec": {"securityContext": "x"}}, "job")
@example({"spec": {"initContainers": ["x"]}}, "jobset")
def test_a_template_of_any_form_is_rendered_or_refused_at_its_place(
    overlay: dict[str, Any], backend: str
) -> None:
    try:
        job = make(podTemplate=overlay, env=TOKEN, backend=backend)
    except InvalidJobError:  # kdist's own rules, which have a place
        return
    found = find_pod_problems(job)
    for path, message, _ in found:
        value: Any = {"spec": {"podTemplate": job.spec.pod_template}}
        for part in path:
            value = value[part]
        assert path[:2] == ("spec", "podTemplate")
        assert message
    if found:
        with pytest.raises(KdistError):
            place(job, backend)
    else:
        place(job, backend)
        warn(job, Placement(backend, "kubernetes", "c0ffee00"))
