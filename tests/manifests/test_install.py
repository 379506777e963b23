"""An image without the trainer: an init container installs it before anything else runs, the pod
stays within Pod Security "restricted", and no value of the job adds anything to the objects.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import zipfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist import backends
from kdist.errors import InvalidJobError, KdistError
from kdist.manifest import Manifest
from kdist.render import find_pods
from kdist.render.overlay import violations
from kdist.render.packages import _pack
from kdist.spec.validators import list_warnings
from kdist_trainer.formats import OBJECT_STORES
from kdist_trainer.object_store.store import ObjectLocation
from tests.manifests.jobs import make, place
from tests.manifests.test_fields import walk
from tests.manifests.test_hostile import HOSTILE, TEXTS, shape

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
LOCK = [
    f"einops==0.8.1 ; python_version >= '3.11' --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}"
]
FULL: dict[str, Any] = {
    "packages": ["einops>=0.8", "transformers[torch]>=5,<6 ; sys_platform == 'linux'"],
    "index": "http://pypi.tools:8080/simple",
    "wheels": {"claim": "wheels", "path": "torch/extras"},
    "cache": {"claim": "built"},
    "size": "2Gi",
    "lock": LOCK,
}
FETCHED = [{"url": "s3://team-data/speech", "mountPath": "/data"}]


def find_pod(objects: list[Manifest]) -> dict[str, Any]:
    (pod,) = [pod for each in objects for pod in find_pods(each.document)]
    return dict(pod)


def find_listed(objects: list[Manifest]) -> list[str]:
    (found,) = [each.document for each in objects if "-install-" in each.name]
    lines: list[str] = found["data"]["requirements.txt"].splitlines()
    return lines


@KINDS
def test_the_trainer_is_installed_before_it_fetches_and_every_container_finds_it(
    backend: str,
) -> None:
    objects = place(make(install=FULL, data=FETCHED), backend)
    pod = find_pod(objects)
    spec = pod["spec"]
    first, second = spec["initContainers"]
    assert (first["name"], second["name"]) == ("fetch-packages", "fetch-data-0")
    assert first["command"] == ["python", "-m", "kdist_trainer.install"]
    assert {
        "--folder=/packages",
        "--no-deps",
        "--require-hashes",
        "--index-url=http://pypi.tools:8080/simple",
        "--find-links=/wheels",
    } <= set(first["args"])
    assert "--no-index" not in first["args"]
    mounts = {each["mountPath"]: each for each in first["volumeMounts"]}
    assert mounts["/wheels"]["subPath"] == "torch/extras"
    (container,) = spec["containers"]
    assert container["command"] == ["python", "-m", "kdist_trainer.processes.init"]
    for each in (second, container):
        variables = {one["name"]: one.get("value") for one in each["env"]}
        assert variables["PYTHONPATH"] == "/packages/site"
        mounted = {one["mountPath"]: one for one in each["volumeMounts"]}
        assert mounted["/packages"] == {
            "name": "packages",
            "mountPath": "/packages",
            "readOnly": True,
        }
    assert spec["securityContext"]["runAsUser"] == 65532
    assert violations(pod) == []
    assert find_listed(objects) == LOCK
    assert "8080" in json.dumps([each.document for each in objects if each.kind == "NetworkPolicy"])


@pytest.mark.parametrize("scheme", OBJECT_STORES)
def test_every_object_store_brings_its_client(scheme: str) -> None:
    data = [{"url": f"{scheme}://team/set", "mountPath": "/data"}]
    for found in ({"data": data}, {"checkpoints": {"url": f"{scheme}://team/runs"}}):
        listed = find_listed(place(make(install={}, **found)))
        assert any(line.startswith("obstore>") for line in listed)
        ObjectLocation(f"{scheme}://team/runs")


def test_without_a_lock_pip_gets_what_the_trainer_needs_for_this_job() -> None:
    bucket = {"url": "s3://team/runs"}
    init = {"workload": "digits", "epochs": 1, "init": {"url": "hf://owner/model@v1"}}
    objects = place(make(install={"wheels": {"claim": "wheels"}}, checkpoints=bucket, train=init))
    names = {line.partition(">=")[0] for line in find_listed(objects)}
    assert {"pydantic", "msgspec", "obstore", "huggingface-hub"} <= names
    assert "torch" not in names
    arguments = find_pod(objects)["spec"]["initContainers"][0]["args"]
    assert "--no-index" in arguments
    assert "--no-deps" not in arguments
    assert "obstore" not in {
        line.partition(">=")[0] for line in find_listed(place(make(install={})))
    }


def test_a_job_without_it_has_not_a_byte_of_it() -> None:
    for each in place(make()):
        text = json.dumps({**each.document, "data": None})
        assert "install" not in text
        assert "packages" not in text


def test_the_archive_is_the_trainer_and_the_same_bytes_whenever_it_is_made() -> None:
    archive = _pack()
    _pack.cache_clear()
    assert _pack() == archive
    names = set(zipfile.ZipFile(io.BytesIO(archive)).namelist())
    assert {"kdist_trainer/__main__.py", "kdist_trainer/workloads/digits.bin.gz"} <= names
    assert not any("__pycache__" in name for name in names)
    objects = place(make(install={}))
    (found,) = [each.document for each in objects if "-install-" in each.name]
    assert base64.b64decode(found["binaryData"]["trainer.zip"]) == archive
    assert found["immutable"]


@pytest.mark.parametrize(
    ("install", "message"),
    [
        ({"packages": ["--index-url=http://evil"]}, "must be a package as pip names it"),
        ({"packages": ["einops @ https://evil/x.whl"]}, "must be a package as pip names it"),
        ({"packages": ["einops\n--pre"]}, "must be a package as pip names it"),
        ({"lock": ["einops==1"]}, "must be a package with its digests"),
        ({"index": "https://me:secret@pypi.example.com/simple"}, "must not contain credentials"),
        ({"wheels": {"claim": "w", "path": "../x"}}, "must not contain `..`"),
        ({"wheels": {"claim": "w", "url": "s3://bucket/w"}}, "needs exactly one of claim and url"),
        ({"wheels": {"url": "s3://bucket/w", "path": "x"}}, "is a path in a claim"),
        ({"wheels": {"url": "s3://bucket/w"}, "lock": LOCK}, "cannot be used with wheels.url"),
        ({"cache": {}}, "needs exactly one of claim and hostPath"),
        ({"cache": {"hostPath": "/var/../etc"}}, "must not contain `..`"),
    ],
)
def test_what_pip_would_read_as_something_else_is_refused(
    install: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJobError) as raised:
        make(install=install)
    assert message in str(raised.value)
    assert "me:secret" not in str(raised.value)


def test_the_variable_that_finds_the_packages_is_not_the_jobs() -> None:
    env = [{"name": "PYTHONPATH", "value": "/mine"}]
    assert make(env=env).spec.env
    with pytest.raises(InvalidJobError, match="is set by kdist where install is given"):
        make(env=env, install={})


def test_more_than_a_config_map_holds_is_refused() -> None:
    lock = [f"package{n}==1 {' '.join([f'--hash=sha256:{n:064x}'] * 100)}" for n in range(60)]
    with pytest.raises(KdistError, match="do not fit into a ConfigMap"):
        place(make(install={"lock": lock}))


def test_a_claim_is_written_to_only_where_the_job_says_so() -> None:
    data = [{"claim": "results", "mountPath": "/out", "access": "ReadWrite"}]
    spec = find_pod(place(make(data=data)))["spec"]
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "data-0"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "data-0"]
    assert not mount["readOnly"]
    assert not volume["persistentVolumeClaim"]["readOnly"]
    with pytest.raises(InvalidJobError, match="is for a claim"):
        make(data=[{**FETCHED[0], "access": "ReadWrite"}])


URL: dict[str, Any] = {
    "url": "s3://team-data/wheels",
    "endpoint": "https://minio.example.com:9000",
    "region": "eu-central-1",
    "secret": "store",
    "size": "1Gi",
    "sha256": "0123456789abcdef" * 4,
}
VARIANTS: list[dict[str, Any]] = [
    FULL,
    {**FULL, "wheels": URL, "cache": {"hostPath": "/var/k"}, "lock": []},
]
INSTALL_LEAVES = [
    (variant, path)
    for variant, install in enumerate(VARIANTS)
    for path, value in walk(install)
    if isinstance(value, str) and path[0] != "packages"
] + [(0, ("packages", 1))]
SHAPES = {
    (variant, backend): [
        sorted(shape(each.document), key=str) for each in place(make(install=install), backend)
    ]
    for variant, install in enumerate(VARIANTS)
    for backend in backends.NAMES
}


@given(
    place_=st.sampled_from(INSTALL_LEAVES),
    text=TEXTS | st.sampled_from(HOSTILE),
    backend=st.sampled_from(backends.NAMES),
)
def test_a_hostile_value_is_refused_or_changes_only_values(
    place_: tuple[int, tuple[str | int, ...]], text: str, backend: str
) -> None:
    variant, path = place_
    changed: Any = copy.deepcopy(VARIANTS[variant])
    inner = changed
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = text
    try:
        job = make(install=changed)
    except InvalidJobError:
        return
    found = [sorted(shape(each.document), key=str) for each in place(job, backend)]
    assert found == SHAPES[variant, backend]


@KINDS
def test_a_cache_is_written_by_the_container_that_installs_and_read_by_all_others(
    backend: str,
) -> None:
    spec = find_pod(place(make(install=FULL, data=FETCHED), backend))["spec"]
    first, second = spec["initContainers"]
    assert "--cache=/kdist/packages-cache" in first["args"]
    mounts = [
        mount
        for each in (first, second, *spec["containers"])
        for mount in each["volumeMounts"]
        if mount["name"] == "packages-cache"
    ]
    assert [each.get("readOnly", False) for each in mounts] == [False, True, True]
    assert {each["mountPath"] for each in mounts} == {"/kdist/packages-cache"}
    (volume,) = [each for each in spec["volumes"] if each["name"] == "packages-cache"]
    assert volume["persistentVolumeClaim"] == {"claimName": "built"}


def test_a_cache_on_the_nodes_is_warned_of() -> None:
    job = make(install={"cache": {"hostPath": "/var/kdist"}})
    pod = find_pod(place(job))
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "packages-cache"]
    assert volume["hostPath"] == {"path": "/var/kdist", "type": "Directory"}
    assert violations(pod) == ["volume packages-cache: hostPath is not allowed"]
    (warning,) = list_warnings(job.spec)
    assert "reject the pods" in warning
    assert not list_warnings(make(install=FULL).spec)


def test_wheels_of_a_bucket_are_fetched_by_the_container_that_installs_with_its_credentials() -> (
    None
):
    objects = place(make(install={"packages": ["mine"], "wheels": URL}))
    spec = find_pod(objects)["spec"]
    (first,) = spec["initContainers"]
    given = {each for each in first["args"] if each.startswith("--wheels=")}
    assert {"--wheels=--url=s3://team-data/wheels", "--wheels=--max-bytes=1073741824"} <= given
    assert "--needed=obstore>=0.12" in first["args"]
    assert "--needed=mine" not in first["args"]
    variables = {one["name"]: one for one in first["env"]}
    secret = variables["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]
    assert secret["name"] == "store"
    assert "AWS_SECRET_ACCESS_KEY" not in {one["name"] for one in spec["containers"][0]["env"]}
    assert "wheels" not in {each["name"] for each in spec["volumes"]}
    assert "9000" in json.dumps([each.document for each in objects if each.kind == "NetworkPolicy"])
