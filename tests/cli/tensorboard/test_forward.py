"""What the words of `kdist port-forward NAME tensorboard` mean, for a run on this machine."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.errors import UsageError
from kdist.tensorboard.forward import read_port
from tests.cli.conftest import Kdist
from tests.patience import soon


@pytest.mark.parametrize(
    ("text", "port"), [("tensorboard", 6006), ("8080:tensorboard", 8080), (":tensorboard", 0)]
)
def test_tensorboard_has_its_own_port_or_the_one_that_is_named(text: str, port: int) -> None:
    assert read_port(text) == port


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a port"):
        read_port("70000:tensorboard")


def test_tensorboard_goes_alone(kdist: Kdist) -> None:
    for words in (("tensorboard", "metrics"), ("tensorboard", "--rank", "1")):
        done = kdist("port-forward", "digits", *words)
        assert done.exit_code == 2
        assert "cannot be combined" in done.stderr


def test_a_run_without_event_files_says_so_and_what_to_type(kdist: Kdist, tmp_path: Path) -> None:
    root = make_run(tmp_path)
    done = kdist("port-forward", str(root), ":tensorboard")
    assert done.exit_code == 1
    assert "no event files" in done.stderr
    assert f"tensorboard --logdir {root / 'checkpoints/tensorboard'}" in done.stderr


@pytest.mark.sampled
@pytest.mark.processes
def test_tensorboard_of_a_run_on_this_machine_goes_with_the_one_who_looks_even_by_kill(
    tmp_path: Path,
) -> None:
    root = make_run(tmp_path)
    (root / "checkpoints/tensorboard").mkdir(parents=True)
    command = [sys.executable, "-m", "kdist", "port-forward", str(root), ":tensorboard"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as forwarding:
        try:
            printed = re.search(
                r"http://127\.0\.0\.1:(\d+)/",
                forwarding.stdout.readline() if forwarding.stdout else "",
            )
            assert printed
            with socket.create_connection(("127.0.0.1", int(printed[1])), timeout=60):
                pass
        finally:
            forwarding.kill()
    assert soon(lambda: not listens(int(printed[1])), seconds=60)


def make_run(home: Path) -> Path:
    """A run folder as `kdist run` leaves it."""
    root = home / "digits"
    root.mkdir()
    (root / "run.json").write_text(
        json.dumps({"run_id": "r", "checkpoints": str(root / "checkpoints")})
    )
    return root


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
