"""Agents in a pod with an address of each family, in a network namespace that has both: metrics and
status are served at each and on loopback, and nothing listens anywhere else.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.faults.sockets import listeners
from tests.house.tree import ROOT
from tests.trainer.agent.lab import Lab, descendants

V4, V6 = "10.9.0.7", "fd00::7"
PORT = 29_400  # the network is this test's own
SERVED = (V4, V6, "127.0.0.1", "::1")
NETWORK = f"""
ip link set lo up && ip addr add {V4}/32 dev lo && ip addr add {V6}/128 dev lo nodad || exit 77
exec "$@"
"""
LACKING = 77


def address_of(text: str) -> str:
    """An address as people write it, from /proc."""
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    packed = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def look(folder: Path) -> dict[str, Any]:
    """Train in this network namespace; where the agents listen, and what answers there."""
    place = f"c10d:{V4}:{PORT}"
    with Lab(folder, rendezvous=place, nodes={"min": 2, "max": 2}) as lab:
        lab.arguments = ["--address", V4, "--listen", f"{V4},{V6}"]
        lab.start("node-0", "node-1")
        ranks = {rank["pid"] for rank in lab.stepping(1, world=2).values()}
        agents = [agent.pid for agent in lab.agents.values()]
        pids = [each for agent in agents for each in (agent, *descendants(agent))]
        notes = [json.loads(path.read_text()) for path in folder.glob("node-*/agent.json")]
        found = {
            "ports": [note["port"] for note in notes],
            "listen": [
                (address_of(each.address), each.port) for each in listeners({*pids} - ranks)
            ],
            "healthy": [read(host, note["port"]) for note in notes for host in SERVED],
        }
        lab.tell("finish")
        return {**found, "ended": [lab.end("node-0"), lab.end("node-1")]}


def read(host: str, port: int) -> str:
    address = f"[{host}]" if ":" in host else host
    with urllib.request.urlopen(f"http://{address}:{port}/healthz", timeout=30) as answer:
        text: str = answer.read().decode().strip()
        return text


@pytest.mark.processes
@pytest.mark.sampled
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("unshare") or not shutil.which("ip"),
    reason="needs Linux, unshare and ip",
)
def test_in_a_pod_of_both_families_agents_serve_at_both_and_on_loopback(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.trainer.agent.test_dual_stack", str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", NETWORK, "sh", *line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == LACKING or "unshare failed" in done.stderr:
        pytest.skip(f"no network namespace with both families can be made: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ended"] == [0, 0]
    assert len(found["ports"]) == 2
    assert set(found["healthy"]) == {"ok"}
    listen = {(host, port) for host, port in found["listen"]}
    served = {(host, port) for host in SERVED for port in found["ports"]}
    assert served <= listen
    assert {host for host, _ in listen - served} <= {V4}, "what peers use, at the first address"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(Path(sys.argv[1]))))
