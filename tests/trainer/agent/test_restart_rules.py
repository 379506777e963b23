"""`spec.restart.rules` decide over a failure before the table of causes does: real scripts that end
by exit codes, signals and errors of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.lab import Lab

_COUNT = "import os, signal, sys\nstarts = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
_ERRORS = "class Away(RuntimeError): pass\nclass FarAway(Away): pass\n"


def run(
    folder: Path, text: str, *rules: dict[str, Any], **job: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a script on one node; returns its exit record and the restarts."""
    script = folder / "train.py"
    script.write_text(_COUNT + text)
    settings = {"maxRestarts": 2, "restart": {"rules": list(rules)}, **job}
    with Lab(folder, script={"path": str(script)}, **settings) as lab:
        lab.start("node-0")
        code = lab.end("node-0")
        assert code == lab.record("node-0")["code"]
        return lab.record("node-0"), lab.events("node-0", "restarting")


def on_codes(action: str, operator: str, *values: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(values)}}


@pytest.mark.sampled
@pytest.mark.processes
def test_an_error_that_is_ignored_starts_the_job_again_and_counts_against_nothing(
    tmp_path: Path,
) -> None:
    text = _ERRORS + "if starts < 3: raise FarAway('the service')\n"
    record, restarts = run(tmp_path, text, {"action": "Ignore", "onErrors": ["Away"]})
    assert record["outcome"] == "done"
    assert [(one["restarts"], one.get("budget")) for one in restarts] == [
        (1, None),
        (2, None),
        (3, None),
    ]
    assert restarts[0]["failure"] == "FarAway: the service (spec.restart.rules: Ignore)"


@pytest.mark.sampled
@pytest.mark.processes
def test_an_exit_code_that_counts_is_tried_again_up_to_the_jobs_limit(tmp_path: Path) -> None:
    rules = (on_codes("FailJob", "In", 9), on_codes("Count", "NotIn", 1))
    record, restarts = run(tmp_path, "sys.exit(42)\n", *rules)
    assert [(one["restarts"], one["budget"]) for one in restarts] == [(1, 2), (2, 2)]
    assert (record["code"], record["cause"]) == (75, "budget")
    assert record["message"] == (
        "restart limit reached: 2 restarts without progress; the last failure: rank 0 exited with "
        "code 42 (spec.restart.rules: Count)"
    )


@pytest.mark.processes
def test_a_signal_and_a_gpu_that_fail_the_job_are_not_tried_again(tmp_path: Path) -> None:
    killed = "os.kill(os.getpid(), signal.SIGKILL)\n"
    record, restarts = run(tmp_path, killed, on_codes("FailJob", "In", 137))
    assert (record["code"], record["cause"], restarts) == (70, "signal", [])
    assert record["message"].endswith("was killed by SIGKILL (spec.restart.rules: FailJob)")


@pytest.mark.sampled
@pytest.mark.processes
def test_a_fault_of_a_gpu_counts_as_the_rule_says_and_not_at_all_where_none_are_wanted(
    tmp_path: Path,
) -> None:
    text = (
        "import torch\nerror = torch.AcceleratorError('CUDA error: uncorrectable ECC error')\n"
        "error.error_code = 214\nraise error\n"
    )
    names = ["torch.AcceleratorError"]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    record, restarts = run(first, text, {"action": "Count", "onErrors": names})
    assert [(one["restarts"], one["budget"]) for one in restarts] == [(1, 2), (2, 2)]
    assert (record["code"], record["cause"]) == (75, "budget")
    record, restarts = run(second, text, restart={"deviceFaults": 0})
    assert (record["code"], record["cause"], restarts) == (75, "budget", [])
