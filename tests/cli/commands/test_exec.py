"""`kdist exec -o json` holds a bounded part of what a command writes, and counts the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdist import cluster
from tests.cli.cluster.api import Api, Reply
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, api, file, serve, store
from tests.cli.job.cluster.world import FIRST
from tests.cli.status.objects import pod

__all__ = ["api", "file", "serve", "store"]
MIB = 1 << 20
SUCCESS = b'{"status": "Success"}'


@pytest.fixture
def written() -> dict[int, bytes]:
    """What a command in a pod writes, by its channel."""
    return {1: b"short", 2: b"", 3: SUCCESS}


@pytest.fixture(autouse=True)
def running(api: Api, store: Store, file: Path, written: dict[int, bytes], kdist: Kdist) -> None:
    """A cluster with a job that has a pod, in which every command writes that."""
    assert kdist("apply", str(file)).exit_code == 0
    store.put(f"{CORE}/pods/{FIRST}", pod(0))
    api.answer = lambda asked: (
        Reply(channels=written) if asked.path.endswith("/exec") else store(asked)
    )


def test_what_is_written_beyond_the_limit_is_counted_and_named(
    kdist: Kdist, written: dict[int, bytes]
) -> None:
    written[1], written[2] = b"a" * (12 * MIB), b"b" * 7
    ended = kdist("exec", "digits", "--pod", FIRST, "-o", "json", "--", "yes")
    found = json.loads(ended.stdout)
    assert (ended.exit_code, found["exitCode"]) == (0, 0), ended.stderr
    assert found["stdout"] == "a" * (10 * MIB)
    assert found["stderr"] == "b" * 7
    assert found["omittedBytes"] == {"stdout": 2 * MIB, "stderr": 0}
    (warning,) = found["warnings"]
    assert f"{2 * MIB} bytes more to stdout than the 10 MiB" in warning


def test_what_fits_is_whole(kdist: Kdist) -> None:
    found = json.loads(kdist("exec", "digits", "--pod", FIRST, "-o", "json", "--", "echo").stdout)
    assert (found["stdout"], found["omittedBytes"]) == ("short", {"stdout": 0, "stderr": 0})
    assert "warnings" not in found


def test_output_is_passed_on_while_it_comes_and_not_collected(written: dict[int, bytes]) -> None:
    written[1] = b"a" * (20 * MIB)
    pieces: list[int] = []
    connected = cluster.connect()
    code = connected.exec(FIRST, ["yes"], out=lambda data: pieces.append(len(data)))
    assert (code, sum(pieces)) == (0, 20 * MIB)
    assert max(pieces) < 2 * MIB
