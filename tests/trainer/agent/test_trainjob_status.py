"""What Kubeflow Trainer is told of a TrainJob: a request as its server of progress takes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.agent import trainjob_status
from kdist_trainer.agent.trainjob_status import TrainJobStatusReporter, describe
from tests.patience import soon

STATUS: dict[str, Any] = {
    "state": "running",
    "step": 40,
    "target_steps": 100,
    "loss": 0.25,
    "learning_rate": 0.1,
    "samples_per_second": 12.5,
    "last_checkpoint_step": None,
    "restarts": 1,
    "ranks": [{"rank": 1, "step_seconds": 9.0}, {"rank": 0, "step_seconds": 0.5}],
}
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/digits/status"
# The limits of TrainJob's own schema.


class Trainer(HTTPServer):
    """Answers with `code` and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code = 200
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.came = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Trainer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.code)
        self.end_headers()
        self.wfile.write(b'{"message": "Forbidden"}')
        self.server.came.set()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    server = Trainer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv(trainjob_status.URL, f"http://127.0.0.1:{server.server_port}{PATH}")
    monkeypatch.setenv(trainjob_status.TOKEN, str(tmp_path / "token"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_progress_has_the_form_that_trainer_takes() -> None:
    found = describe(STATUS)
    assert found is not None
    assert found.pop("lastUpdatedTime").endswith("Z")
    assert found == {
        "progressPercentage": 40,
        "estimatedRemainingSeconds": 30,
        "metrics": [
            {"name": "step", "value": "40"},
            {"name": "loss", "value": "0.25"},
            {"name": "learning_rate", "value": "0.1"},
            {"name": "samples_per_second", "value": "12.5"},
            {"name": "restarts", "value": "1"},
        ],
    }


def test_only_the_node_of_rank_0_tells_it_and_what_is_unknown_is_left_out() -> None:
    assert describe({**STATUS, "ranks": STATUS["ranks"][:1]}) is None
    assert describe({**STATUS, "step": None}) is None
    former = [describe({**STATUS, "state": state}) for state in ("standby", "rendezvous")]
    assert former == [None, None], "another node may have rank 0 by now"
    assert "progressPercentage" not in (describe({**STATUS, "target_steps": None}) or {})
    slow = [{"rank": 0, "step_seconds": 1e12}]
    beyond = describe({**STATUS, "step": 101, "ranks": slow}) or {}
    assert (beyond["progressPercentage"], beyond["estimatedRemainingSeconds"]) == (100, 0)
    assert "estimatedRemainingSeconds" not in (describe({**STATUS, "ranks": slow}) or {})
    text = describe({**STATUS, "ranks": [{"rank": 0, "step_seconds": "nan"}]}) or {}
    assert "estimatedRemainingSeconds" not in text


def test_it_is_sent_while_the_training_runs_and_at_its_end(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob_status, "_SECONDS", 0.01)
    status = dict(STATUS)
    sender = TrainJobStatusReporter(lambda: status)
    assert trainer.came.wait(60)
    (tmp_path / "token").write_text("rotated\n")
    status["step"] = 100
    sender.end()
    path, token, body = trainer.asked[-1]
    assert (path, token) == (PATH, "Bearer rotated")
    assert body["trainerStatus"]["progressPercentage"] == 100
    assert trainer.asked[0][1] == "Bearer first"


def test_a_refusal_is_said_once_and_ends_nothing(
    trainer: Trainer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob_status, "_SECONDS", 0.01)
    trainer.code = 403
    sender = TrainJobStatusReporter(lambda: STATUS)
    assert soon(lambda: len(trainer.asked) >= 2)
    sender.end()
    logged = "".join(capfd.readouterr())
    assert logged.count("trainjob-status-failed") == 1
    assert 'status 403: {"message": "Forbidden"}'.replace('"', '\\"') in logged


def test_no_fault_of_its_own_ends_the_agent(
    trainer: Trainer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob_status, "_SECONDS", 3600.0)
    TrainJobStatusReporter(dict).end()
    assert "trainjob-status-failed" in "".join(capfd.readouterr())
    assert not trainer.asked


def test_elsewhere_nothing_is_read_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trainjob_status.URL, raising=False)
    TrainJobStatusReporter(lambda: pytest.fail("it is read")).end()
