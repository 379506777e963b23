"""A real API server on etcd, both as plain processes on free ports, with one namespace, one
ConfigMap and the job's Role.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.rendezvous.configmap_client import ApiEndpoint, ConfigMap
from kdist_trainer.rendezvous.exchange import KEY_FILE
from kdist_trainer.rendezvous.handler import pick_port
from tests.trainer.rendezvous.keys import KEY_TEXT

BINARIES = Path(os.environ.get("KDIST_CLUSTER_BIN", Path.home() / ".cache/kdist-cluster/bin"))
NAMESPACE, NAME = "ml", "digits-rendezvous"
_ADMIN, _POD = "admin-token", "pod-token"
_PATIENCE = 120.0


class ControlPlane:
    """Runs within a `with` block. `account` is the folder of a pod's account, which may get and
    update the ConfigMap.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.account = folder / "account"
        self._etcd_port, self._peer_port, self.port = (pick_port() for _ in range(3))
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ControlPlane:
        if not (BINARIES / "kube-apiserver").exists():
            pytest.skip(
                f"no kube-apiserver in {BINARIES}: `tests/cluster/cluster` builds it "
                "where it starts the cluster"
            )
        self.account.mkdir(parents=True)
        (self.account / "token").write_text(_POD)
        (self.account / KEY_FILE).write_text(KEY_TEXT)
        (self.folder / "tokens.csv").write_text(
            f'{_ADMIN},admin,1,"system:masters"\n{_POD},pod,2\n'
        )
        openssl = shutil.which("openssl") or "openssl"
        subprocess.run(
            [openssl, "genrsa", "-out", str(self.folder / "sa.key"), "2048"],
            check=True,
            capture_output=True,
        )
        address = f"http://127.0.0.1:{self._etcd_port}"
        etcd = [str(BINARIES / "etcd"), "--data-dir", str(self.folder / "etcd")]
        etcd += ["--listen-client-urls", address, "--advertise-client-urls", address]
        etcd += ["--listen-peer-urls", f"http://127.0.0.1:{self._peer_port}", "--unsafe-no-fsync"]
        self._etcd = self._start("etcd", etcd)
        self.start()
        self._create_objects()
        shutil.copy(self.folder / "certificates" / "apiserver.crt", self.account / "ca.crt")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()

    def start(self) -> None:
        """Start the API server and wait until it is ready."""
        api = [
            str(BINARIES / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://test",
            f"--service-account-key-file={self.folder / 'sa.key'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
        ]
        self._api = self._start("api", api)
        deadline = time.monotonic() + _PATIENCE
        while not self._is_ready():
            assert self._api.poll() is None, (self.folder / "api.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "the API server does not get ready"
            time.sleep(0.2)

    def stop(self) -> None:
        """Kill the API server."""
        if self._api is not None:
            self._api.kill()
            self._api.wait()
            self._api = None

    def server(self) -> ApiEndpoint:
        """The API server as a pod knows it."""
        return ApiEndpoint("127.0.0.1", self.port, account=self.account)

    def config_map(self, *, retry_seconds: float = 60.0) -> ConfigMap:
        """A new client with the permissions of a pod."""
        return ConfigMap(self.server(), NAMESPACE, NAME, retry_seconds=lambda: retry_seconds)

    def environment(self) -> dict[str, str]:
        """A pod's variables for this server and its account."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "KDIST_ACCOUNT": str(self.account),
        }

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        token: str = _ADMIN,
        media_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request, by default as an administrator. Raises `urllib.error.HTTPError`."""
        context = ssl.create_default_context(
            cafile=str(self.folder / "certificates" / "apiserver.crt")
        )
        headers = {"Authorization": f"Bearer {token}", "Content-Type": media_type}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=10, context=context) as response:  # noqa: S310 - our own server
            text = response.read()
        document: dict[str, Any] = (
            json.loads(text) if text.startswith(b"{") else {"text": text.decode()}
        )
        return document

    def _is_ready(self) -> bool:
        try:
            return bool(self.request("GET", "/readyz")["text"] == "ok")
        except (OSError, urllib.error.URLError):
            return False

    def _create_objects(self) -> None:
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
        pod = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "pod"}
        rule = {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [NAME],
            "verbs": ["get", "update"],
        }
        core = f"/api/v1/namespaces/{NAMESPACE}"
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        self.request("POST", f"{core}/configmaps", {"metadata": {"name": NAME}})
        self.request("POST", f"{rbac}/roles", {"metadata": {"name": NAME}, "rules": [rule]})
        self.request(
            "POST",
            f"{rbac}/rolebindings",
            {"metadata": {"name": NAME}, "roleRef": role, "subjects": [pod]},
        )

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
