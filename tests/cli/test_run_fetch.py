"""`kdist run` with data and weights by URL: fetched once into the cache, from real servers, before
any agent starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Run, Start, Terminal, processes_of, read_ledger, write_job
from tests.cli.weights import make_weights
from tests.house.tree import ROOT
from tests.patience import soon
from tests.trainer.fetch.web_server import WebServer
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, Entry, S3Server
from tests.trainer.object_store.versitygw import versitygw

pytestmark = pytest.mark.processes

CORPUS = bytes(range(256)) * 4096
SOURCES = ROOT / "tests/cluster/src"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server of files, and an empty cache."""
    monkeypatch.setenv("KDIST_CACHE", str(tmp_path / "cache"))
    with WebServer({"/sets/corpus.bin": CORPUS}) as server:
        yield server


def write(home: Path, *data: dict[str, Any], init: str | None = None, **train: Any) -> str:
    """A job of one node that reads what is below /corpus."""
    shutil.copytree(SOURCES, home / "src", dirs_exist_ok=True)
    settings = {
        "workload": "calm:Corpus",
        "steps": 4,
        "globalBatch": 32,
        "checkpoint": {"every": {"steps": 4}},
        **({} if init is None else {"init": {"url": init}}),
        **train,
    }
    return write_job(home, nodes=1, code="src", data=list(data), train=settings)


def corpus_of(run: Run) -> list[str]:
    log = (run.folder("digits") / "node-0" / "log").read_text()
    lines = [line.partition("corpus ")[2] for line in log.splitlines() if "corpus " in line]
    return list(dict.fromkeys(line for line in lines if line))


@pytest.mark.sampled
def test_data_and_weights_are_fetched_before_the_training_and_only_once(
    start: Start, tmp_path: Path, web: WebServer
) -> None:
    web.files["/model.safetensors"] = make_weights()
    digest = sha256(CORPUS).hexdigest()
    data = {"url": f"{web.url}/sets/corpus.bin", "mountPath": "/corpus", "sha256": digest}
    job = write(tmp_path, data, init=f"{web.url}/model.safetensors")
    run = start(job, "-o", "json")
    report = json.loads(run.wait(0))
    assert report["steps"]["reached"] == 4
    assert corpus_of(run) == [f"corpus.bin {len(CORPUS)}"]
    lines = run.errors()
    assert f"fetches {web.url}/sets/corpus.bin: 1 file, 1.0 MB" in lines
    assert lines.index("data-ready") < lines.index("agent-started")
    sent = dict(web.sent)
    assert sent["/sets/corpus.bin"] == len(CORPUS)

    told = report_of(tmp_path)
    assert told["secondsByCategory"]["fetch"] > 0

    again = start("--fresh", job)
    again.wait(0)
    assert web.sent == sent, "nothing is fetched twice"
    assert "of which 1.0 MB are here" in again.errors()


def report_of(home: Path) -> dict[str, Any]:
    """What `kdist report` says of the run."""
    command = [sys.executable, "-m", "kdist", "report", "digits", "--local", "-o", "json"]
    environment = {**os.environ, "KDIST_HOME": str(home / "runs")}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.sampled
def test_a_path_on_this_machine_is_used_instead_of_the_url(
    start: Start, tmp_path: Path, web: WebServer
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "part.txt").write_text("here")
    data = {"url": f"{web.url}/sets/corpus.bin", "path": "own", "mountPath": "/corpus"}
    run = start(write(tmp_path, data))
    run.wait(0)
    assert corpus_of(run) == ["part.txt 4"]
    assert web.requests == []


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"sha256": "0" * 64}, 65, ["SHA-256 of corpus.bin", "0" * 64]),
        ({"size": "1Ki"}, 65, ["spec.data[0].size", "1048576 bytes"]),
        ({"url": "/sets/none.bin"}, 65, ["spec.data[0]", "/sets/none.bin"]),
    ],
)
@pytest.mark.sampled
def test_what_cannot_be_fetched_is_one_error_that_names_the_field(
    start: Start,
    tmp_path: Path,
    web: WebServer,
    change: dict[str, str],
    code: int,
    words: list[str],
) -> None:
    data = {"url": "/sets/corpus.bin", "mountPath": "/corpus"} | change
    data["url"] = web.url + data["url"]
    run = start("--propagate-exit-code", write(tmp_path, data), "-o", "json")
    report = json.loads(run.wait(code))
    assert (report["outcome"], report["failure"]["cause"]) == ("failed", "data")
    (error,) = [line for line in run.errors().splitlines() if line.startswith("Error: ")]
    assert error.startswith("Error: digits failed (data): spec.data[0]")
    for word in words:
        assert word in error
    assert "Traceback" not in run.errors()
    assert "agent-started" not in run.errors()
    assert f"its log is {run.folder('digits')}/fetch-data-0/log" in run.errors()


@pytest.mark.sampled
def test_ctrl_c_keeps_what_was_fetched_and_the_next_run_goes_on_from_there(
    start: Start, tmp_path: Path, web: WebServer
) -> None:
    web.files["/sets/corpus.bin"] = CORPUS * 8
    web.gate.clear()  # the second half does not come
    data = {"url": f"{web.url}/sets/corpus.bin", "mountPath": "/corpus"}
    job = write(tmp_path, data)
    run = start(job)
    folder = run.folder("digits")
    half = len(CORPUS) * 4
    run.wait_until(lambda: partial_bytes(tmp_path) >= half // 2, "half of the data")
    run.process.send_signal(signal.SIGINT)
    run.wait(130)
    assert "what was fetched is kept" in run.errors()
    assert "digits stopped; nothing was saved yet." in run.errors()
    assert soon(lambda: not processes_of(folder)), processes_of(folder)
    web.gate.set()
    web.sent.clear()

    again = start(job)
    again.wait(0)
    assert corpus_of(again) == [f"corpus.bin {len(CORPUS) * 8}"]
    assert web.sent["/sets/corpus.bin"] <= len(CORPUS) * 8 - half // 2
    assert read_ledger(folder, "steps")[-1]["step"] == 4


def test_the_death_of_a_run_ends_its_fetch(start: Start, tmp_path: Path, web: WebServer) -> None:
    web.files["/sets/corpus.bin"] = CORPUS * 8
    web.gate.clear()
    run = start(write(tmp_path, {"url": f"{web.url}/sets/corpus.bin", "mountPath": "/corpus"}))
    folder = run.folder("digits")
    run.wait_until(lambda: partial_bytes(tmp_path) > 0, "a part of the data")
    assert any("kdist_trainer.fetch" in each for each in processes_of(folder))
    run.process.kill()
    assert soon(lambda: not processes_of(folder)), processes_of(folder)


def partial_bytes(home: Path) -> int:
    return sum(path.stat().st_size for path in (home / "cache").rglob("partial/*"))


@pytest.mark.sampled
def test_a_terminal_shows_how_far_it_is_and_status_says_it_too(
    start: Start, tmp_path: Path, web: WebServer, kdist: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files["/sets/corpus.bin"] = CORPUS * 8
    web.gate.clear()
    data = {"url": f"{web.url}/sets/corpus.bin", "mountPath": "/corpus"}
    with Terminal() as terminal:
        run = start(write(tmp_path, data), stderr=terminal.theirs)
        terminal.close_theirs()
        run.wait_until(lambda: "of 8.4 MB" in terminal.text(), "progress")
        monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
        shown = kdist("status", "digits")
        assert f"fetching {web.url}/sets/corpus.bin" in shown.stdout
        assert "Starting" in shown.stdout
        web.gate.set()
        run.wait_until(lambda: "digits is done" in terminal.text(), "end")


@pytest.fixture(params=["ours", pytest.param("versitygw", marks=pytest.mark.e2e)])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The endpoint of a bucket with two objects below `speech`, on our server and on a real one."""
    monkeypatch.setenv("KDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    objects = {"speech/a.bin": b"a" * 1000, "speech/more/b.bin": b"b" * 2000, "other": b"c"}
    if request.param == "ours":
        with S3Server(page=1) as server:
            for number, (name, content) in enumerate(objects.items()):
                server.objects[name] = Entry(content, f'"{number}"', 0.0)
            yield server.endpoint
        return
    folder = tmp_path / "gateway"
    folder.mkdir()
    with versitygw(folder, access_key=ACCESS_KEY, secret=SECRET, bucket=BUCKET) as endpoint:
        for name, content in objects.items():
            path = folder / "data" / BUCKET / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield endpoint


@pytest.mark.sampled
def test_everything_below_a_prefix_of_a_bucket_is_fetched(
    start: Start, tmp_path: Path, bucket: str
) -> None:
    data = {"url": f"s3://{BUCKET}/speech", "mountPath": "/corpus", "endpoint": bucket}
    run = start(write(tmp_path, data | {"region": "us-east-1"}))
    run.wait(0)
    assert corpus_of(run) == ["a.bin 1000", "more/b.bin 2000"]
    assert SECRET not in run.errors()
    for log in run.folder("digits").rglob("log"):
        assert SECRET not in log.read_text()
