"""Random files over servers that fail at random: what comes is equal byte for byte, or the error is
one that says what to do. KDIST_FAULTS is the number of seeds.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.patience import soon
from tests.trainer.fetch.conftest import Bucket
from tests.trainer.fetch.hub import Hub
from tests.trainer.fetch.program import Ended, Program, start
from tests.trainer.fetch.web_server import WebServer, drawn
from tests.trainer.object_store import s3_server

pytestmark = pytest.mark.processes

SEEDS = int(os.environ.get("KDIST_FAULTS", "3"))
SHARE = 0.4


def draw_files(generator: random.Random) -> dict[str, bytes]:
    """Files of random sizes, in folders and not."""
    sizes = [0, 1, 1000, 65_536, 300_000, 9_000_000]
    names = ["a", "b.bin", "deep/c", "deep/er/d", "with space"]
    return {
        name: generator.randbytes(generator.choice(sizes))
        for name in generator.sample(names, generator.randint(1, len(names)))
    }


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(SEEDS))
def test_files_come_whole_whatever_fails_and_whoever_is_killed(
    web: WebServer, bucket: Bucket, tmp_path: Path, seed: int
) -> None:
    generator = random.Random(seed)
    files = draw_files(generator)
    web.faults = drawn(seed, SHARE)
    web.has_ranges = generator.random() < 0.7
    web.has_etag = generator.random() < 0.7
    hub = Hub(web)
    hub.commit(files)
    assert bucket.server is not None
    bucket.server.faults = s3_server.drawn(seed, SHARE)
    for name, data in files.items():
        bucket.put(f"set/{name}", data)
    name = generator.choice(sorted(files))
    web.files["/one"] = files[name]
    for kind in ("bucket", "hub", "web"):
        folder = tmp_path / kind
        for _ in range(generator.randint(0, 2)):
            program = begin(kind, web, bucket, folder)
            soon(lambda: program.process.poll() is not None or is_begun(folder), 20)  # noqa: B023 - at once
            program.kill(signal.SIGKILL)
        ended: Ended = begin(kind, web, bucket, folder).wait()
        assert ended.code == 0, (seed, kind, ended.stdout, ended.stderr)
        assert ended.files == ({"one": files[name]} if kind == "web" else files), (seed, kind)
        assert ended.stderr == "", (seed, kind)


def is_begun(folder: Path) -> bool:
    """Whether something has come that is not whole yet."""
    try:
        return any(folder.glob("partial/*"))
    except FileNotFoundError:  # all is fetched meanwhile
        return False


def begin(kind: str, web: WebServer, bucket: Bucket, folder: Path) -> Program:
    """Start a fetch of this kind."""
    if kind == "bucket":
        return bucket.start("set", folder)
    url = "hf://team/model" if kind == "hub" else f"{web.url}/one"
    return start(url, folder, HF_ENDPOINT=web.url)
