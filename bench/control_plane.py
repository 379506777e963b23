"""A Kubernetes control plane of our own for measurements: etcd and an API server on loopback, with
the controllers that make pods, from the programs that `tests/cluster/cluster build` has built.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "users": ["observed"]}],
}
"""What the audit log holds: the requests of one user."""
PROGRAMS = Path(os.environ.get("KDIST_CLUSTER_CACHE", Path.home() / ".cache/kdist-cluster")) / "bin"


class ControlPlane:
    """A control plane in a folder.

    Attributes:
        kubeconfig: the file with which its administrator reaches it.
        observed: that of another administrator, whose requests are in `audit`.
        audit: the API server's log, one JSON object a line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = _free_port()
        self.kubeconfig = folder / "kubeconfig"
        self.observed = folder / "observed.kubeconfig"
        self.audit = folder / "audit.log"

    def start(self, *, controllers: str = "") -> None:
        """Start it and wait until it is ready.

        Args:
            controllers: those of the controller manager to start too, by comma.
        """
        clients, peers = _free_port(), _free_port()
        self._run(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{clients}",
            f"--advertise-client-urls=http://127.0.0.1:{clients}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        key = self._folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self._folder / "tokens.csv").write_text(
            "admin,admin,1,system:masters\nobserved,observed,2,system:masters\n"
        )
        (self._folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{clients}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self._folder / 'certificates'}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
            "--enable-priority-and-fairness=false",
            f"--audit-policy-file={self._folder / 'policy.yaml'}",
            f"--audit-log-path={self.audit}",
        )
        self._write_kubeconfig(self.kubeconfig, "admin")
        self._write_kubeconfig(self.observed, "observed")
        self._wait()
        if controllers:
            self._run(
                "kube-controller-manager",
                f"--kubeconfig={self.kubeconfig}",
                f"--controllers={controllers}",
                "--use-service-account-credentials=false",
                "--leader-elect=false",
                f"--secure-port={_free_port()}",
                f"--cert-dir={self._folder / 'manager'}",
                "--kube-api-qps=400",
                "--kube-api-burst=800",
                "--concurrent-job-syncs=20",
            )

    def kubectl(self, *args: str, stdin: str = "") -> str:
        """What kubectl prints; it must succeed."""
        command = [str(PROGRAMS / "kubectl"), f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> None:
        """End all of it."""
        for process in reversed(self._processes):
            process.terminate()
            process.wait()

    def _run(self, program: str, *options: str) -> None:
        with (self._folder / f"{program}.log").open("wb") as log:
            command: Sequence[str | Path] = [PROGRAMS / program, *options]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _wait(self) -> None:
        while True:
            for process in self._processes:
                assert process.poll() is None, f"{process.args!r} ended: see {self._folder}"
            try:
                if self._get("/readyz") == "ok":
                    return
            except OSError:
                time.sleep(0.2)

    def _get(self, path: str) -> str:
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._port}{path}", headers={"Authorization": "Bearer admin"}
        )
        context = ssl.create_default_context(
            cafile=str(self._folder / "certificates" / "apiserver.crt")
        )
        context.check_hostname = False
        with urllib.request.urlopen(request, context=context, timeout=30) as response:  # noqa: S310 - of our own
            text: str = response.read().decode()
            return text

    def _write_kubeconfig(self, file: Path, token: str) -> None:
        cluster = {"server": f"https://127.0.0.1:{self._port}", "insecure-skip-tls-verify": True}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "own",
            "clusters": [{"name": "own", "cluster": cluster}],
            "users": [{"name": "own", "user": {"token": token}}],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": "own"}}],
        }
        file.write_text(yaml.safe_dump(document))


@contextmanager
def control_plane(folder: Path, *, controllers: str = "") -> Iterator[ControlPlane]:
    """A control plane for as long as the context lasts."""
    plane = ControlPlane(folder)
    try:
        plane.start(controllers=controllers)
        yield plane
    finally:
        plane.stop()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
