"""What a thousand TrainingJobs cost the controller: how soon a changed spec reaches the objects,
its memory, and its requests while nothing happens.

    python -m bench.controller [JOBS] [silent]

It runs against an API server of its own, with the controllers that make pods from Jobs, and kwok's
nodes, on which pods run without containers; `tests/cluster/cluster build` builds all but kwok,
which is searched in PATH. One HTTP server answers for the agents of all pods; with `silent` there
is none, so that no job progresses and the controller looks for the reason.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.control_plane import ControlPlane, control_plane
from kdist import cluster
from kdist.cluster import Cluster
from kdist.crd import definition
from kdist_trainer.formats import METRICS_PORT

NAMESPACES = 50
CHANGES = 100
PAUSE_SECONDS = 0.5
IDLE_SECONDS = 60.0
NODES = 20
CONTROLLERS = "namespace,garbagecollector,job,disruption,serviceaccount"
TRAININGJOB = ("kdist.dev/v1alpha1", "TrainingJob")
READY = """
conditions:
- {type: Ready, status: "True", lastHeartbeatTime: {{ Now | Quote }}}
addresses:
- {type: InternalIP, address: {{ NodeIP | Quote }}}
"""
RUNNING = """
phase: Running
podIP: 127.0.0.1
startTime: {{ Now | Quote }}
conditions:
- {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ Now | Quote }}}}
{{ end }}
"""
"""The status that kwok gives a pod. Its own stages would also complete the pods of Jobs at once."""
STATUS = {
    "state": "running",
    "generation": 1,
    "world_size": 1,
    "step": 100,
    "target_steps": 1000,
    "ranks": [{"rank": 0, "step": 100, "phase": "step", "heartbeat_age": 0.1}],
}
"""The answer of every agent."""


def main() -> None:
    """Measure and print."""
    count = int(next((each for each in sys.argv[1:] if each.isdigit()), "1000"))
    answers = nullcontext() if "silent" in sys.argv[1:] else agents()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            answers,
            control_plane(folder, controllers=CONTROLLERS) as plane,
            nodes(plane, folder),
        ):
            os.environ["KUBECONFIG"] = str(plane.kubeconfig)
            plane.kubectl("apply", "--server-side", "-f", "-", stdin=definition.text())
            plane.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.kdist.dev")
            client = cluster.connect()
            keys = list(create(plane, client, count))
            began = time.monotonic()
            with controller(folder, plane.observed) as process:
                wait_until_made(client, count)
                print(f"{count} jobs made in {time.monotonic() - began:.0f} s")
                settle(client, process)
                measure_changes(client, keys)
                measure_rest(plane, process, count)


class _Agent(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(STATUS).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def agents() -> Iterator[None]:
    """A server that answers for the agents of all pods, which have its address."""
    with ThreadingHTTPServer(("127.0.0.1", METRICS_PORT), _Agent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@contextmanager
def nodes(plane: ControlPlane, folder: Path) -> Iterator[None]:
    """Nodes of kwok; without it the pods stay pending."""
    kwok = shutil.which("kwok")
    if kwok is None:
        print("(no kwok in PATH: no pod runs, so the jobs are not idle but wait)")
        yield
        return
    for number in range(NODES):
        plane.kubectl("create", "-f", "-", stdin=json.dumps(_node(number)))
    with (folder / "kwok.log").open("wb") as log:
        stages = folder / "stages.json"
        stages.write_text("\n---\n".join(map(json.dumps, _stages())))
        options = [
            "--manage-all-nodes=true",
            f"--kubeconfig={plane.kubeconfig}",
            f"--config={stages}",
        ]
        process = subprocess.Popen([kwok, *options], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _node(number: int) -> dict[str, object]:
    room = {"cpu": "1000", "memory": "1000Gi", "pods": "1000"}
    metadata = {"name": f"node-{number}", "annotations": {"kwok.x-k8s.io/node": "fake"}}
    status = {"allocatable": room, "capacity": room}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def _stages() -> Iterator[dict[str, object]]:
    """What happens: nodes are ready, pods run, and go when they are deleted."""
    ready = '.status.conditions.[] | select( .type == "Ready" ) | .status'
    new = {"key": ready, "operator": "NotIn", "values": ["True"]}
    pending = {"key": ".status.phase", "operator": "In", "values": ["Pending"]}
    deleted = {"key": ".metadata.deletionTimestamp", "operator": "Exists"}
    alive = deleted | {"operator": "DoesNotExist"}
    rules: tuple[tuple[str, str, object, object], ...] = (
        ("node-ready", "Node", [new], {"statusTemplate": READY}),
        ("pod-ready", "Pod", [alive, pending], {"statusTemplate": RUNNING}),
        ("pod-delete", "Pod", [deleted], {"finalizers": {"empty": True}, "delete": True}),
    )
    for name, kind, expressions, change in rules:
        yield {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "Stage",
            "metadata": {"name": name},
            "spec": {
                "resourceRef": {"apiGroup": "v1", "kind": kind},
                "selector": {"matchExpressions": expressions},
                "next": change,
            },
        }


def create(plane: ControlPlane, client: Cluster, count: int) -> Iterator[tuple[str, str]]:
    """Create the TrainingJobs; yields namespace and name of each."""
    for number in range(NAMESPACES):
        plane.kubectl("create", "namespace", f"team-{number}")
    keys = [(f"team-{number % NAMESPACES}", f"job-{number}") for number in range(count)]

    def send(key: tuple[str, str]) -> None:
        namespace, name = key
        number = int(name.rpartition("-")[2])
        # bound to a node at once, so that no scheduler is needed
        overlay = {"spec": {"nodeName": f"node-{number % NODES}"}}
        spec = {
            "backend": "job",
            "image": "registry.example.com/kdist-trainer:1",
            "nodes": {"min": 1, "max": 2},
            "replicas": 1,
            "podTemplate": overlay,
            "train": {"workload": "digits", "epochs": 3},
        }
        metadata = {"name": name, "namespace": namespace}
        client.send_create(
            {
                "apiVersion": TRAININGJOB[0],
                "kind": TRAININGJOB[1],
                "metadata": metadata,
                "spec": spec,
            }
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, keys))
    yield from keys


@contextmanager
def controller(folder: Path, kubeconfig: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The controller as a process."""
    with (folder / "controller.log").open("wb") as log:
        options = ["--metrics-port", "0", "--log-level", "warning"]
        process = subprocess.Popen(
            [sys.executable, "-m", "kdist_controller", *options],
            stderr=log,
            env=os.environ | {"KUBECONFIG": str(kubeconfig)},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        shown = (folder / "controller.log").read_text().splitlines()
        print(f"(lines of its log: {len(shown)}{', such as ' + shown[-1] if shown else ''})")


def wait_until_made(client: Cluster, count: int) -> None:
    """Return once every job has its workload."""
    while len(client.list("batch/v1", "Job", all_namespaces=True, metadata_only=True)) < count:
        time.sleep(1.0)


def settle(client: Cluster, process: subprocess.Popen[bytes]) -> None:
    """Return once no status has changed for a while."""
    before: set[str] = set()
    while True:
        found = {
            str(each["metadata"]["resourceVersion"])
            for each in client.list(*TRAININGJOB, all_namespaces=True, metadata_only=True)
        }
        print(f"resident {resident(process.pid):.0f} MiB, {len(found - before)} have changed")
        if len(found - before) <= len(found) // 50:
            return
        before = found
        time.sleep(15.0)


def measure_changes(client: Cluster, keys: Sequence[tuple[str, str]]) -> None:
    """Scale jobs and print how long their workloads take to follow."""
    followed: dict[tuple[str, str], float] = {}
    seen = threading.Event()
    version = client.list_with_version("batch/v1", "Job", namespace=None)[1]

    def watch() -> None:
        for _, job in client.follow("batch/v1", "Job", namespace=None, since=version):
            if job and (job.get("spec") or {}).get("parallelism") == 2:
                key = (job["metadata"]["namespace"], job["metadata"]["name"])
                followed.setdefault(key, time.monotonic())
            if len(followed) >= min(CHANGES, len(keys)):
                seen.set()
                return

    threading.Thread(target=watch, daemon=True).start()
    chosen = list(keys)
    secrets.SystemRandom().shuffle(chosen)
    chosen = chosen[:CHANGES]
    asked = {}
    for namespace, name in chosen:
        asked[namespace, name] = time.monotonic()
        client.send_patch(*TRAININGJOB, name, {"spec": {"replicas": 2}}, namespace=namespace)
        time.sleep(PAUSE_SECONDS)
    seen.wait(120.0)
    taken = sorted(followed[key] - asked[key] for key in asked if key in followed)
    print(f"{len(taken)} of {len(chosen)} changes have reached the workload")
    for share in (0.5, 0.9, 0.99, 1.0):
        index = min(len(taken) - 1, int(share * len(taken)))
        print(f"  p{share * 100:.0f}  {taken[index] * 1000:7.0f} ms")


def measure_rest(plane: ControlPlane, process: subprocess.Popen[bytes], count: int) -> None:
    """Print the memory, and the requests while nothing is asked for."""
    time.sleep(IDLE_SECONDS)  # what the changes have caused
    before = requests(plane)
    time.sleep(IDLE_SECONDS)
    found = requests(plane) - before
    total = sum(found.values())
    print(f"{total / count * 60 / IDLE_SECONDS:.2f} requests per job and minute at rest, of all")
    for name, number in found.most_common(8):
        print(f"  {number:6d}  {name}")
    print(f"resident {resident(process.pid):.0f} MiB, at most {resident(process.pid, 'HWM'):.0f}")


def requests(plane: ControlPlane) -> Counter[str]:
    """Requests of the controller that the API server has answered, by verb and resource."""
    found: Counter[str] = Counter()
    for line in plane.audit.read_text().splitlines():
        event = json.loads(line)
        resource = event.get("objectRef") or {}
        parts = (resource.get("resource", event["requestURI"]), resource.get("subresource"))
        found[f"{event['verb']} {'/'.join(filter(None, parts))}"] += 1
    return found


def resident(pid: int, kind: str = "RSS") -> float:
    """Memory of a process in MiB: `RSS` as it is now, `HWM` at most."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^Vm{kind}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
