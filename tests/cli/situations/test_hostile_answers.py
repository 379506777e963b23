"""Every command against a hostile cluster, on a terminal: it shows what it was told as data, with
no control character but those of kdist's own styles, forges no line, and never fails on it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kdist.app import COMMANDS
from tests.cli.cluster.api import write_kubeconfig
from tests.cli.cluster.conftest import Serve
from tests.cli.situations import runs, test_situations
from tests.cli.situations.hostile_cluster import (
    BLINK,
    FORGED,
    TITLE,
    HostileCluster,
    confuse,
    poison,
)
from tests.cli.situations.terminal import show
from tests.cli.status import objects
from tests.draw import read_commit

home, serve, _hurry = test_situations.home, test_situations.serve, test_situations._hurry

TYPED = (
    *("get", "get digits", "get digits -o json", "get digits -o yaml", "status digits"),
    *("status digits -o json", "logs digits --tail 2", "wait digits --timeout 0", "events digits"),
    *("why digits", "top digits --once", "top digits --once -o prom", "report digits"),
    *("profile digits --steps 2 --timeout 1", "checkpoints digits", "exec digits -- echo hello"),
    *("diff job.yaml", "apply job.yaml --direct", "scale digits --nodes 3 --no-wait"),
    *("suspend digits --no-wait", "resume digits --no-wait", "restart digits --no-wait"),
    *("recover digits", "drill digits --fault rank --timeout 1", "doctor"),
    *("port-forward digits :9401", "delete digits --no-wait --yes"),
)
WITHOUT_CLUSTER = {
    *(
        "init",
        "validate",
        "explain",
        "run",
        "bench",
        "render",
        "dashboards",
        "completion",
        "convert",
        "version",
    ),
}
SEED = os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONGEST_SECONDS = 60.0


@pytest.fixture
def cluster(home: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileCluster]:
    """A cluster with the job digits, which is not hostile yet."""
    monkeypatch.setattr(time, "time", lambda: runs.AT)
    monkeypatch.setattr(objects, "NOW", datetime.fromtimestamp(runs.AT, UTC))
    root = runs.write_run(home / "pods", ended=False)
    with runs.activate(root):
        found = HostileCluster(root)
        write_kubeconfig(home / "config", serve(found).url)
        monkeypatch.setenv("KUBECONFIG", str(home / "config"))
        assert show("apply", "job.yaml")[0] == 0
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR")
        yield found


def type_in(command: str) -> str:
    """What a command shows, which has ended in time and without an error of its own making."""
    began = time.monotonic()
    _, text = show(*command.split(), press_at="Forwarding from")
    assert time.monotonic() - began < LONGEST_SECONDS
    assert "Traceback" not in text
    return text


def test_every_command_that_asks_a_cluster_is_typed() -> None:
    every = {name for section in COMMANDS.values() for name in section}
    assert {each.split()[0] for each in TYPED} == every - WITHOUT_CLUSTER


@pytest.mark.parametrize("command", TYPED)
def test_no_text_of_a_cluster_is_obeyed_by_the_terminal(
    command: str, cluster: HostileCluster
) -> None:
    cluster.change = poison
    text = type_in(command)
    assert "internal error" not in text
    assert TITLE not in text
    assert BLINK not in text
    plain = OWN.sub("", text)
    odd = {char for char in plain if not char.isprintable() and char not in "\n\t\r"}
    assert odd == set()
    assert not re.search(rf"^{FORGED}", plain, re.MULTILINE)
    assert "\r" not in plain.replace("\r\n", "\n")


@pytest.mark.sampled
@pytest.mark.parametrize("command", TYPED)
def test_no_value_of_a_cluster_makes_a_command_fail_by_itself(
    command: str, cluster: HostileCluster
) -> None:
    cluster.change = confuse(f"{SEED} {command}")
    assert "internal error" not in type_in(command)


@pytest.mark.wide
@pytest.mark.chaos
@pytest.mark.parametrize("command", TYPED)
@pytest.mark.parametrize("number", range(20))
def test_no_value_makes_a_command_fail_however_often_it_is_drawn(
    number: int, command: str, cluster: HostileCluster
) -> None:
    cluster.change = confuse(f"{SEED} {command} {number}")
    assert "internal error" not in type_in(command)
