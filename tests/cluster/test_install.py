"""A job in an image that has Python and torch and nothing of kdist: its pods install the trainer
and its packages from an index in reach of the cluster, as restricted pods with a read-only root, or
take what others have installed from a claim. A code folder of any size comes on the claim with
their checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kdist.render import list_packages
from tests.cluster.abilities import Abilities, describe_claim
from tests.cluster.namespace import CLUSTER, Namespace
from tests.manifests.jobs import make

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.needs("whole-cluster")]

# what these need in turn, as the lock has it
FURTHER = ("annotated-types", "pydantic-core", "typing-extensions", "typing-inspection", "einops")


@pytest.fixture(name="stock")
def name_image(cluster: Mapping[str, str]) -> str:
    if cluster.get("KDIST_E2E") == "kubeconfig":
        pytest.skip("the image without kdist is made for our own cluster")
    printed = subprocess.run(
        [CLUSTER, "stock", cluster["KDIST_IMAGE"]], check=True, capture_output=True, text=True
    ).stdout
    return printed.splitlines()[-1]


@pytest.fixture(name="index")
def serve_index(cluster: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """A package index on this machine's side of the nodes' network, with wheels of the versions
    that run here.
    """
    names = [re.split("[<>=]", each)[0] for each in list_packages(make())]
    wanted = [f"{name}=={version(name)}" for name in [*names, *FURTHER[:-1]]]
    wheels = tmp_path / "wheels"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--dest", str(wheels), *wanted, FURTHER[-1]),
        ],
        check=True,
    )
    for wheel in list(wheels.iterdir()):
        name = wheel.name.partition("-")[0].lower().replace("_", "-").replace(".", "-")
        folder = tmp_path / "index" / "simple" / name
        folder.mkdir(parents=True)
        wheel.rename(folder / wheel.name)
        (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>\n')
    printed = subprocess.run(
        ["kubectl", "get", "nodes", "-o", "json"],
        env=dict(cluster),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    addresses = json.loads(printed)["items"][0]["status"]["addresses"]
    node = next(each["address"] for each in addresses if each["type"] == "InternalIP")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((node, 9))  # sends nothing
        host = probe.getsockname()[0]
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer((host, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{host}:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.sampled
def test_a_job_trains_in_an_image_without_kdist_and_its_checkpoints_are_read_afterwards(
    namespace: Namespace, calm: Callable[..., dict[str, Any]], stock: str, index: str
) -> None:
    install = {"packages": ["einops"], "index": index, "size": "1Gi"}
    train = {"workload": "calm:Calm", "steps": 40}
    namespace.apply(calm(backend="job", image=stock, install=install, train=train))
    namespace.kdist("wait", "digits", timeout=600)
    pod = namespace.pods("digits")[0]["metadata"]["name"]
    installed = namespace.kubectl("logs", pod, "-c", "fetch-packages")
    assert '"packages-installed"' in installed
    job = json.loads(namespace.get("configmap", "digits")["data"]["job.json"])
    assert any(line.startswith("einops==") for line in job["spec"]["install"]["lock"])
    namespace.kubectl("delete", "pods", "--all")
    assert "step-00000040" in namespace.kdist("checkpoints", "verify", "digits")


@pytest.mark.sampled
def test_pods_of_a_cache_install_once_and_later_jobs_start_with_what_is_there(
    namespace: Namespace,
    calm: Callable[..., dict[str, Any]],
    abilities: Abilities,
    stock: str,
    index: str,
) -> None:
    install = {"packages": ["einops"], "index": index, "cache": {"claim": "installed"}}
    train = {"workload": "calm:Calm", "steps": 20}
    jobs = [
        {
            **calm(backend="job", image=stock, install=install, train=train),
            "metadata": {"name": name},
        }
        for name in ("first", "second")
    ]
    namespace.send("apply", stdin=json.dumps(describe_claim("installed", abilities.storage_class)))
    told = []
    for job in jobs:
        name = job["metadata"]["name"]
        namespace.apply(job)
        namespace.kdist("wait", name, timeout=600)
        logs = [
            namespace.kubectl("logs", each["metadata"]["name"], "-c", "fetch-packages")
            for each in namespace.pods(name)
        ]
        assert all('"packages-installed"' in each for each in logs)
        told.append(sorted(": they were there" in each for each in logs))
    assert told == [[False, True], [True, True]]


_TABLE = """
import hashlib, sys
from pathlib import Path
from calm import Calm
class Table(Calm):
    def dataset(self, split):
        data = Path(__file__).parent.joinpath("data", "table.bin").read_bytes()
        sys.stdout.write(f"table {hashlib.sha256(data).hexdigest()}\\n")
        return super().dataset(split)
"""


@pytest.mark.sampled
def test_code_of_fifty_megabytes_is_sent_once_to_the_claim_of_the_job_and_read_there(
    namespace: Namespace, calm: Callable[..., dict[str, Any]], stock: str, index: str
) -> None:
    data = random.Random(7).randbytes(50_000_000)
    folder = namespace.home / "src"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "table.bin").write_bytes(data)
    (folder / "mine.py").write_text(_TABLE)
    train = {"workload": "mine:Table", "steps": 20}
    document = calm(backend="job", image=stock, install={"index": index}, train=train)
    namespace.apply(document)
    (upload,) = find_uploads(namespace)
    namespace.until("the pod is deleted", lambda: not namespace.get("pod", upload))
    namespace.kdist("wait", "digits", timeout=600)
    namespace.kdist("apply", "job.yaml", "--error-unchanged", code=3)
    assert find_uploads(namespace) == {upload}
    assert f"table {hashlib.sha256(data).hexdigest()}" in namespace.kdist("logs", "digits", "--raw")
    (folder / "mine.py").write_text(f"{_TABLE}\n# another one\n")
    namespace.kdist("apply", "job.yaml")
    assert len(find_uploads(namespace)) == 2


def find_uploads(namespace: Namespace) -> set[str]:
    """Names of the pods that have taken code, whether they are there or not."""
    events = json.loads(namespace.kubectl("get", "events", "-o", "json"))["items"]
    names = {each["involvedObject"]["name"] for each in events}
    return {each for each in names if each.startswith("digits-viewer-")}
