"""Starts versitygw, an S3 server for production use that keeps its objects in a folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kdist_trainer.rendezvous.handler import pick_port
from tests.house.tree import ROOT
from tests.patience import soon

CLUSTER = ROOT / "tests/cluster/cluster"


def find_program() -> str:
    """Path of the server, built where it is missing, which takes minutes once."""
    if shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin") is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("versitygw, a real S3 server, is built with Go, which is not installed")
    built = subprocess.run(
        [CLUSTER, "tool", "versitygw"], capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        pytest.fail(f"versitygw could not be built: {built.stderr}")
    return built.stdout.strip().splitlines()[-1]


@contextmanager
def versitygw(
    folder: Path, *, access_key: str, secret: str, bucket: str, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve the folder at an address of this machine; yields the endpoint."""
    program = find_program()
    (folder / "data" / bucket).mkdir(parents=True)
    (folder / "iam").mkdir()
    port = pick_port()
    environment = os.environ | {"ROOT_ACCESS_KEY": access_key, "ROOT_SECRET_KEY": secret}
    arguments = ["--port", f"{host}:{port}", "--iam-dir", str(folder / "iam"), "posix"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments, folder / "data"], env=environment, stdout=log, stderr=log
        )
    try:
        if not soon(lambda: _answers(host, port), seconds=20):
            pytest.fail(f"versitygw did not start: {(folder / 'log').read_text()}")
        yield f"http://{host}:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0
