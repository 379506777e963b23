"""An image without the trainer: an init container installs it before anything else runs, the pod
stays within Pod Security "restricted", and no value of the job adds anything to the objects.
"""

from __future__ import annotations

import base64
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
from tests.manifests.jobs import make, place
from tests.manifests.test_hostile import HOSTILE, TEXTS, shape

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
LOCK = [
    f"einops==0.8.1 ; python_version >= '3.11' --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}"
]
FULL: dict[str, Any] = {
    "packages": ["einops>=0.8", "transformers[torch]>=5,<6 ; sys_platform == 'linux'"],
    "index": "http://pypi.tools:8080/simple",
    "wheels": {"claim": "wheels", "path": "torch/extras"},
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


SHAPES = {
    backend: [sorted(shape(each.document), key=str) for each in place(make(install=FULL), backend)]
    for backend in backends.NAMES
}


@given(
    name=st.sampled_from(["packages", "index", "claim", "path", "size", "lock"]),
    text=TEXTS | st.sampled_from(HOSTILE),
    backend=st.sampled_from(backends.NAMES),
)
def test_a_hostile_value_is_refused_or_changes_only_values(
    name: str, text: str, backend: str
) -> None:
    changed: dict[str, Any] = {**FULL, "wheels": dict(FULL["wheels"])}
    if name in ("claim", "path"):
        changed["wheels"][name] = text
    else:
        changed[name] = [*FULL[name][1:], text] if isinstance(FULL[name], list) else text
    try:
        job = make(install=changed)
    except InvalidJobError:
        return
    found = [sorted(shape(each.document), key=str) for each in place(job, backend)]
    assert found == SHAPES[backend]
