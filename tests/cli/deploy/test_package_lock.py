"""The packages of a job are locked when it is applied, once for what it names; without uv or
without the index it is said that they are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE

DIGESTS = f"--hash=sha256:{'a' * 64} \\\\\n    --hash=sha256:{'b' * 64}"
NAMES = ("msgspec", "prometheus-client", "pydantic", "regex", "xxhash", "safetensors")
PACKAGES = ("--set", "spec.install={packages: [Einops], index: 'https://pypi.example.com/simple'}")


class Uv:
    """A stand-in for uv: an index cannot be reached from every place where tests run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "bin"
        self._folder.mkdir()
        self.answer("\n".join(f"{name}==1.0 \\\\\n    {DIGESTS}" for name in (*NAMES, "einops")))
        monkeypatch.setenv("PATH", f"{self._folder}:/usr/bin:/bin")

    def answer(self, out: str, *, error: str = "", code: int = 0) -> None:
        """What it prints from now on."""
        program = (
            f'#!/bin/sh\necho "$@" >> {self._folder}/calls\ncat > {self._folder}/asked\n'
            f"cat <<'END'\n{out}\nEND\necho '{error}' >&2\nexit {code}\n"
        ).replace("\\\\\n", "\\\n")
        (self._folder / "uv").write_text(program)
        (self._folder / "uv").chmod(0o755)

    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def asked(self) -> list[str]:
        return (self._folder / "asked").read_text().splitlines()


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uv:
    return Uv(tmp_path, monkeypatch)


def lock_of(store: Store) -> list[str]:
    document: Any = json.loads(store.objects[f"{CORE}/configmaps/digits"]["data"]["job.json"])
    lock: list[str] = document["spec"]["install"]["lock"]
    return lock


def test_what_was_locked_stays_until_the_job_names_other_packages(
    api: Api, store: Store, file: Path, kdist: Kdist, uv: Uv
) -> None:
    sent = kdist("apply", str(file), *PACKAGES)
    assert sent.exit_code == Code.OK, sent.stderr
    assert f"einops==1.0 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}" in lock_of(store)
    (call,) = uv.calls()
    assert "--universal --generate-hashes" in call
    assert "--default-index https://pypi.example.com/simple" in call
    assert "Einops" in uv.asked()
    assert not any(each.startswith("torch") for each in uv.asked())
    again = kdist("apply", str(file), *PACKAGES, "--error-unchanged")
    assert again.exit_code == Code.UNCHANGED, again.stdout
    assert len(uv.calls()) == 1
    other = "spec.install={packages: [einops, tqdm], index: 'https://pypi.example.com/simple'}"
    assert kdist("apply", str(file), "--set", other).exit_code == Code.OK
    assert len(uv.calls()) == 2


def test_what_cannot_be_locked_is_said_and_what_cannot_be_installed_is_refused(
    api: Api, store: Store, file: Path, kdist: Kdist, uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = "index: 'https://pypi.example.com/simple'"
    for given in ("{claim: wheels}", "{url: 's3://team/wheels'}, " + index):
        sent = kdist("apply", str(file), "--set", f"spec.install={{wheels: {given}}}")
        assert "are not locked (they are in a folder of wheels)" in sent.stderr
    assert lock_of(store) == []
    assert uv.calls() == []
    uv.answer("", error="error: Failed to fetch: https://pypi.example.com/simple/einops/", code=2)
    sent = kdist("apply", str(file), *PACKAGES)
    assert sent.exit_code == Code.OK
    assert "are not locked (uv: error: Failed to fetch" in sent.stderr
    uv.answer("", error="No solution found when resolving dependencies: no einops>=9", code=1)
    refused = kdist("apply", str(file), *PACKAGES)
    assert refused.exit_code == Code.ERROR
    assert "spec.install.packages cannot be installed together" in refused.stderr
