"""Tells Kubeflow Trainer how the training of a TrainJob progresses, which it writes to
`status.trainerStatus`. Trainer gives pods what that needs where its feature `TrainJobStatus` is on;
elsewhere nothing is sent. Free of torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kdist_trainer import log
from kdist_trainer.formats import seconds_left
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.processes.threads import OnError, start_thread
from kdist_trainer.rendezvous.configmap_client import REQUEST_SECONDS, ApiEndpoint

URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - the path of a file
"""The file of a token that is rotated; the certificate of the server's authority is next to it."""
_SECONDS: Final = 10.0
_LONGEST: Final = 64
_MOST_BYTES: Final = 1 << 16
_METRICS: Final = ("step", "loss", "learning_rate", "samples_per_second", "last_checkpoint_step")


def describe(status: Mapping[str, Any]) -> dict[str, Any] | None:
    """The progress by the agent's `/status`; None without a rank 0 in a group, before a step."""
    rank = next((each for each in status["ranks"] if each["rank"] == 0), None)
    step, target = status["step"], status["target_steps"]
    if rank is None or step is None or status["state"] in ("standby", "rendezvous"):
        return None
    values = {name: status[name] for name in (*_METRICS, "restarts")}
    found: dict[str, Any] = {
        "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "metrics": [
            {"name": name, "value": str(value)[:_LONGEST]}
            for name, value in values.items()
            if value is not None
        ],
    }
    if target:
        found["progressPercentage"] = min(100, 100 * step // target)
        if (left := seconds_left(step, target, [rank["step_seconds"]])) is not None:
            found["estimatedRemainingSeconds"] = round(left)
    return found


class TrainJobStatusReporter:
    """Sends what `read` returns, the `/status` of this agent, every ten seconds and at the end. No
    training waits for it; the first of several failures is logged.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read
        self._ended, self._has_failed = threading.Event(), False
        self._thread: threading.Thread | None = None
        if URL in os.environ and TOKEN in os.environ:
            name = "trainjob-status"
            self._thread = start_thread(self._run, name=name, on_error=OnError.REPORT)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            self._send()
        self._send()

    def end(self) -> None:
        """Send the last progress, and wait some seconds for it at most."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * REQUEST_SECONDS)  # one may be under way

    def _send(self) -> None:
        try:
            if (found := describe(self._read())) is not None:
                _post({"trainerStatus": found})
                self._has_failed = False
        except Exception as error:  # noqa: BLE001 - it must never end a training
            if not self._has_failed:
                message = f"Kubeflow Trainer does not take the progress of the TrainJob: {error}"
                log.warn("trainjob-status-failed", message=message)
            self._has_failed = True


def _post(document: Mapping[str, Any]) -> None:
    url = urlsplit(os.environ[URL])
    folder = Path(os.environ[TOKEN]).parent
    server = ApiEndpoint(url.hostname or "", url.port or 443, url.scheme, account=folder)
    with contextlib.closing(server.connect(REQUEST_SECONDS)) as connection:
        connection.allow(_MOST_BYTES)
        connection.request("POST", url.path, encode_json(document).encode(), server.headers())
        with connection.getresponse() as response:
            text = response.read().decode(errors="replace")
            if response.status != HTTPStatus.OK:
                raise OSError(f"status {response.status}: {text[:200]}")
