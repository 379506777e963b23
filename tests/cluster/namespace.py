"""One namespace of a real cluster, as a user meets it: kdist and kubectl typed in it, its objects,
and what it looked like.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

T = TypeVar("T")

CLUSTER = Path(__file__).parent / "cluster"  # the script that starts one
PATIENCE = 240.0  # seconds; a condition on a loaded machine
REPORT_LINES = 60  # of each pod's log


class Namespace:
    """A namespace and a folder in which commands are typed. Nothing in it outlives its test."""

    def __init__(self, name: str, home: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.home = home
        self.environment = dict(environment)

    def create(self) -> None:
        """Make the namespace, which admits restricted pods only, and wait until it takes pods: its
        account and what webhooks know of it come a moment later.
        """
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": self.name, "labels": labels}
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        self.kubectl("create", "-f", "-", stdin=json.dumps(document))
        if image := self.environment.get("KDIST_IMAGE"):  # an API server alone takes no pods
            pod = json.dumps(_reader("first", "none", image, ""))
            self.type_until_known("create", "--dry-run=server", "-f", "-", stdin=pod)

    def remove(self) -> None:
        """Delete it with all that is in it, without waiting."""
        self.kubectl("delete", "namespace", self.name, "--wait=false")

    def kubectl(self, *args: str, stdin: str = "", anywhere: bool = False) -> str:
        """What kubectl prints; it must succeed. `anywhere` lets objects name other namespaces."""
        place = () if anywhere else ("-n", self.name)
        done = self._type("kubectl", *place, *args, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def type_kubectl(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """The ended `kubectl -n NAMESPACE …`, whatever its code."""
        return self._type("kubectl", "-n", self.name, *args, stdin=stdin)

    def type_until_known(self, *args: str, stdin: str) -> subprocess.CompletedProcess[str]:
        """The same, typed again while something is not found: the server and its webhooks hear of
        an object (a namespace, its account, a TrainJob's runtime) a moment after it was made.
        """
        answers: list[subprocess.CompletedProcess[str]] = []

        def known() -> bool:
            answers.append(self.type_kubectl(*args, stdin=stdin))
            return answers[-1].returncode == 0 or "not found" not in answers[-1].stderr

        assert self.wait_until(known, PATIENCE), answers[-1].stderr
        return answers[-1]

    def send(self, *args: str, stdin: str) -> str:
        """What `kubectl ARGS -f -` prints, once all that these objects name is known."""
        done = self.type_until_known(*args, "-f", "-", stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def kdist(self, *args: str, code: int = 0, timeout: float = PATIENCE) -> str:
        """What `kdist ARGS` prints to stdout, in this namespace; it must end with this code and
        never with a traceback.
        """
        done = self.type_kdist(*args, timeout=timeout)
        assert done.returncode == code, (
            f"kdist {' '.join(args)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def type_kdist(self, *args: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """The ended `kdist COMMAND -n NAMESPACE …`, whatever its code."""
        command, *rest = args
        line = (sys.executable, "-m", "kdist", command, "-n", self.name, *rest)
        done = self._type(*line, timeout=timeout)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start_kdist(self, *args: str, output: Path) -> subprocess.Popen[str]:
        """The same, still running; stdout and stderr go to a file. Whoever starts it ends it."""
        command, *rest = args
        line = [sys.executable, "-m", "kdist", command, "-n", self.name, *rest]
        with output.open("w") as target:
            return subprocess.Popen(
                line,
                cwd=self.home,
                env=self.environment,
                stdout=target,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def apply(self, document: Mapping[str, Any], *args: str) -> str:
        """`kdist apply job.yaml` with this document; `code: ./src` is the folder next to these
        tests.
        """
        self.copy_sources()
        return self.kdist("apply", self.write(document), *args)

    def copy_sources(self) -> None:
        """Put the folder that `code: ./src` means next to the job file."""
        shutil.copytree(Path(__file__).parent / "src", self.home / "src", dirs_exist_ok=True)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object; `{}` if there is none."""
        printed = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(printed) if printed else {}

    def find(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of a kind, by name."""
        return sorted(
            json.loads(self.kubectl("get", kind, "-l", selector, "-o", "json"))["items"],
            key=lambda each: each["metadata"]["name"],
        )

    def pods(self, job: str) -> list[dict[str, Any]]:
        """The job's pods that nobody is taking away, by name."""
        return [
            pod
            for pod in self.find("pods", f"kdist.dev/job={job}")
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def status(self, job: str) -> dict[str, Any]:
        """What `kdist status -o json` knows of the job."""
        document: dict[str, Any] = json.loads(self.kdist("status", job, "-o", "json"))
        return document

    def read_metrics(self, pod: str) -> str:
        """Prometheus text of a pod's agent, through the API server."""
        path = f"/api/v1/namespaces/{self.name}/pods/{pod}:9401/proxy/metrics"
        return self.kubectl("get", "--raw", path)

    def evict(self, pod: str) -> None:
        """What `kubectl drain` does to a pod: it asks again while the disruption budget refuses."""
        metadata = {"name": pod, "namespace": self.name}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{self.name}/pods/{pod}/eviction"
        words = ("kubectl", "create", "--raw", path, "-f", "-")
        self.until(
            f"{pod} is evicted",
            lambda: self._type(*words, stdin=json.dumps(eviction)).returncode == 0,
        )

    def agents(self, job: str) -> list[dict[str, Any]]:
        """What the agents of the job's pods say on /status; those that do not answer are left
        out.
        """
        reported = []
        for pod in self.pods(job):
            name = pod["metadata"]["name"]
            path = f"/api/v1/namespaces/{self.name}/pods/{name}:9401/proxy/status"
            done = self._type("kubectl", "get", "--raw", path, "--request-timeout=5s")
            if done.returncode == 0:
                reported.append(json.loads(done.stdout))
        return reported

    def volume(self, job: str, *, export: bool = False) -> dict[str, Any]:
        """What is in the job's volume: `done`, `steps` and `events` of the ledger, and the
        checkpoints, verified.

        With `export` also `exported`, the digest of the last one's weights as they are exported.
        """
        reader = f"reader-{secrets.token_hex(3)}"
        script = f"{_EXPORTED.read_text()}\n{_READ}" if export else _READ
        pod = _reader(reader, job, self.environment["KDIST_IMAGE"], script)
        self.kubectl("create", "-f", "-", stdin=json.dumps(pod))

        def ended() -> bool:
            return self.get("pod", reader)["status"].get("phase") in {"Succeeded", "Failed"}

        self.until("the volume was read", ended)
        # after torch's warnings
        document: dict[str, Any] = json.loads(self.kubectl("logs", reader).splitlines()[-1])
        self.kubectl("delete", "pod", reader, "--wait=false")
        return document

    def until(self, what: str, condition: Callable[[], T], seconds: float = PATIENCE) -> T:
        """The first true answer of the condition, asked ten times a second, soon twice a second."""
        answer = self.wait_until(condition, seconds)
        if not answer:
            pytest.fail(f"waited {seconds:.0f} s in vain: {what}")
        return answer

    def wait_until(self, condition: Callable[[], T], seconds: float) -> T:
        """The same; after so many seconds the last answer, which is not true."""
        end, pause = time.monotonic() + seconds, 0.1
        while not (answer := condition()) and time.monotonic() <= end:
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
        return answer

    def write(self, document: Mapping[str, Any], name: str = "job.yaml") -> str:
        """A file in the folder of this namespace; returns its name."""
        (self.home / name).write_text(yaml.safe_dump(dict(document), sort_keys=False))
        return name

    def look(self) -> str:
        """What a person would look at after a failure: objects, events, the pods' last words."""
        here = ("kubectl", "-n", self.name)
        parts = [
            self._type(*here, "get", "all,pvc,configmap", "-o", "wide").stdout,
            self._type(*here, "get", "events", "--sort-by=.lastTimestamp").stdout,
        ]
        for pod in self._type(*here, "get", "pods", "-o", "name").stdout.split():
            for previous, when in (("false", ""), ("true", " before its restart")):
                options = (f"--previous={previous}", f"--tail={REPORT_LINES}")
                log = self._type(*here, "logs", pod, *options)
                if log.returncode == 0:
                    parts.append(f"--- {pod}{when}\n{log.stdout}")
        return "\n".join(parts)

    def _type(
        self, *command: str, stdin: str = "", timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.home,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


_EXPORTED = Path(__file__).parents[1] / "trainer/checkpoint/exported.py"
_READ = """
import json, sys
from pathlib import Path
from kdist_trainer.checkpoint.__main__ import describe
folder = Path(sys.argv[1])
def lines(name):
    path = folder / "ledger" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
done = folder / "DONE"
print(json.dumps({
    **describe(folder, verify=True),
    "done": json.loads(done.read_text()) if done.exists() else None,
    "steps": lines("steps.jsonl"), "events": lines("events.jsonl"),
    "exported": digest_of_export(folder) if "digest_of_export" in globals() else None,
}))
"""


def _reader(name: str, job: str, image: str, script: str) -> dict[str, Any]:
    """A pod that prints what is in the job's volume."""
    container = {
        "name": "reader",
        "image": image,
        "command": ["/usr/bin/tini", "--", "python", "-c", script, f"/checkpoints/{job}"],
        "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints", "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": f"{job}-checkpoints"}}
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
