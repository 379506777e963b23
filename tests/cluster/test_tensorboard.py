"""`kdist port-forward NAME tensorboard` on a real cluster: of a job at work, and of one that is
over.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace
from tests.trainer.tensorboard.served import shown_steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_COUNT = """
from pathlib import Path
print(sum(b"-m\\0kdist_trainer.tensorboard" in path.read_bytes() \
for path in Path("/proc").glob("[0-9]*/cmdline")))
"""


@pytest.mark.sampled
def test_tensorboard_shows_a_job_at_work_and_one_that_is_over_and_leaves_nothing_running(
    namespace: Namespace, calm: Job, tmp_path: Path
) -> None:
    namespace.apply(
        calm(
            nodes=1,
            train={
                "steps": 1_000_000,
                "evaluate": "never",
                "checkpoint": {"every": {"seconds": 4}},
            },
        )
    )
    namespace.kdist("wait", "digits", "--for=first-step", "--timeout=4m")

    def forward() -> tuple[str, str]:
        printed: Any = namespace.until(
            "it forwards",
            lambda: re.search(r"in pod (\S+): http://127\.0\.0\.1:(\d+)/", output.read_text()),
        )
        return printed[1], printed[2]

    output = tmp_path / "running"
    forwarding = namespace.start_kdist("port-forward", "digits", ":tensorboard", output=output)
    try:
        pod, port = forward()
        assert pod == namespace.pods("digits")[0]["metadata"]["name"]
        steps = namespace.until("the loss is drawn", lambda: shown_steps(port))
        assert steps == sorted(set(steps))
    finally:
        forwarding.kill()
        forwarding.wait(30)
    namespace.until(
        "TensorBoard is gone from the pod",
        lambda: namespace.kdist("exec", "digits", "--", "python", "-c", _COUNT).strip() == "0",
    )

    namespace.kdist("suspend", "digits")
    output = tmp_path / "over"
    forwarding = namespace.start_kdist("port-forward", "digits", ":tensorboard", output=output)
    try:
        pod, port = forward()
        assert "viewer" in pod
        namespace.until("the loss is drawn", lambda: shown_steps(port))
        forwarding.send_signal(signal.SIGINT)
        assert forwarding.wait(60) == 0
    finally:
        forwarding.kill()
        forwarding.wait(30)
    namespace.until("the pod that looked is gone", lambda: namespace.find("pods") == [])
