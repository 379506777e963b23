"""What `kdist why` says to type after a failure on a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.diagnose import diagnose
from tests.cli.diagnose.scenes import FAILED, scene
from tests.cli.status.objects import ended_pod, record

APPLY = "kdist apply JOB.yaml -n ml && kdist restart digits -n ml"
LINE = 'File "/code/train.py", line 7, in loss'


@pytest.mark.parametrize(
    ("cause", "known", "expected"),
    [
        ("user_code", {"rerun": "fixed", "place": LINE}, f"fix /code/train.py:7, then {APPLY}"),
        ("user_code", {"place": None}, f"do what the fix says, then {APPLY}"),
        (
            "user_code",
            {"rerun": "fixed", "signature": "missing-package", "advice": "pip: pip install timm"},
            f"build an image that has the package, then {APPLY}",
        ),
        (
            "device",
            {"rerun": "blocking", "place": LINE},
            f"add CUDA_LAUNCH_BLOCKING=1 to spec.env, then {APPLY}",
        ),
        ("budget", {"rerun": "again"}, "kdist restart digits -n ml"),
    ],
)
def test_the_next_command_never_repeats_unchanged_what_must_fail_again(
    cause: str, known: dict[str, Any], expected: str
) -> None:
    code = 75 if cause == "budget" else 70
    told = record(code, cause, message="it said so", **known)
    logs, *others = diagnose(scene([ended_pod(1, code, record=told)], state=FAILED)).commands
    assert logs.startswith("kdist logs digits -n ml")
    assert others == [expected]
