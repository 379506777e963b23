"""The files of `spec.code` in a ConfigMap: named by what they hold, readable where they are text,
and small enough; or a ConfigMap or a claim that is on the cluster already.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest

from kdist import backends
from kdist.errors import KdistError
from kdist.manifest import CONFIG_MAP_BYTES
from kdist.render import find_pods
from kdist.render.context import pack
from tests.manifests.jobs import make, place


def test_every_file_comes_back_from_its_key() -> None:
    files = {
        "train.py": b"x = 1\n",
        "lib/ünï name.py": "y = '😀'\n".encode(),
        "weights.bin": b"\xff\x00\x01",
        "empty.py": b"",
    }
    packed = pack(files)
    texts = {key: text.encode() for key, text in packed["data"].items()}
    contents = texts | {key: base64.b64decode(text) for key, text in packed["binary"].items()}
    found = {item["path"]: contents[item["key"]] for item in packed["items"]}
    assert found == files
    assert list(packed["binary"].values()) == [base64.b64encode(b"\xff\x00\x01").decode()]


def test_a_key_is_one_that_a_config_map_takes_and_stands_for_one_file() -> None:
    packed = pack({"a/b": b"", "a_b": b"", "x" * 400: b"", "ü": b""})
    keys = [item["key"] for item in packed["items"]]
    assert len(set(keys)) == 4
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in keys)


def test_the_name_changes_with_every_change_of_a_file_and_with_nothing_else() -> None:
    files = {"a.py": b"1", "b.py": b"2"}
    digest = pack(files)["digest"]
    assert re.fullmatch("[0-9a-f]{10}", digest)
    assert pack(dict(reversed(files.items())))["digest"] == digest
    others = [
        {"a.py": b"1"},
        {"a.py": b"1", "b.py": b"3"},
        {"a.py": b"1", "c.py": b"2"},
        {"a.py": b"12", "b.py": b""},
    ]
    assert len({digest, *(pack(other)["digest"] for other in others)}) == 5


def test_more_than_a_config_map_holds_is_refused_with_the_files_to_blame() -> None:
    pack({"just.bin": b"\xff" * CONFIG_MAP_BYTES})
    blamed = r"spec\.code has 1025 KiB.*at most 1024 KiB: big\.bin \(1020 KiB\), b\.py \(3 KiB\)"
    with pytest.raises(KdistError, match=blamed) as error:
        pack({"big.bin": b"\xff" * 1020 * 1024, "b.py": b"#" * 3072, "a.py": b"#" * 2048})
    assert "spec.data" in error.value.hint


@pytest.mark.parametrize("backend", backends.NAMES)
def test_a_config_map_of_the_user_is_mounted_as_the_code_and_not_made(backend: str) -> None:
    rendered = place(make(code={"configMap": "my-code"}), backend)
    assert not any("-code-" in each.name or each.name == "my-code" for each in rendered)
    pods = [pod["spec"] for each in rendered for pod in find_pods(each.document)]
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        assert "--code=/code" in container["args"]
        assert {"name": "code", "mountPath": "/code", "readOnly": True} in container["volumeMounts"]
        source = {"name": "my-code", "defaultMode": 0o444}
        assert {"name": "code", "configMap": source} in pod["volumes"]


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize(
    ("claim", "volume"), [("mine", "code"), ("kept", "checkpoints"), ("images", "data-0")]
)
def test_code_on_a_claim_is_mounted_read_only_and_by_one_volume_of_each_claim(
    backend: str, claim: str, volume: str
) -> None:
    code = {"claim": claim, "subPath": "team/src"}
    data = [{"claim": "images", "mountPath": "/data"}]
    rendered = place(make(code=code, data=data, checkpoints={"claim": "kept"}), backend)
    pods = [pod["spec"] for each in rendered for pod in find_pods(each.document)]
    for pod in pods:
        (container,) = pod["containers"]
        assert "--code=/code" in container["args"]
        (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/code"]
        where = {"name": volume, "mountPath": "/code"}
        assert mount == {**where, "subPath": "team/src", "readOnly": True}
        claims = [each.get("persistentVolumeClaim") for each in pod["volumes"]]
        named = [each["claimName"] for each in claims if each is not None]
        assert sorted(named) == sorted({"images", "kept", claim})
    own = {"name": "code", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    assert all((own in pod["volumes"]) == (volume == "code") for pod in pods)


def test_pods_that_run_the_code_of_another_config_map_are_another_version() -> None:
    def version(**spec: Any) -> list[str]:
        (workload,) = [each for each in place(make(**spec)) if each.kind == "Job"]
        (pod,) = find_pods(workload.document)
        args = pod["spec"]["containers"][0]["args"]
        return [each for each in args if each.startswith("--rendezvous-id=")]

    one, other = (version(code={"configMap": name}) for name in ("one", "other"))
    assert one != other != version()
    claims = [{"claim": "one"}, {"claim": "other"}, {"claim": "one", "subPath": "src"}]
    assert len({*one, *other, *version(), *(version(code=each)[0] for each in claims)}) == 6
