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
        ("user_code", {"rerun": "fixed", "place": LINE}, ("fix /code/train.py:7", APPLY)),
        ("user_code", {"place": None}, ("do what the fix says", APPLY)),
        (
            "user_code",
            {"rerun": "fixed", "signature": "missing-package", "advice": "pip: pip install timm"},
            ("build an image that has the package", APPLY),
        ),
        (
            "device",
            {"rerun": "blocking", "place": LINE},
            ("add CUDA_LAUNCH_BLOCKING=1 to spec.env", APPLY),
        ),
        ("budget", {"rerun": "again"}, ("", "kdist restart digits -n ml")),
    ],
)
def test_the_next_command_never_repeats_unchanged_what_must_fail_again(
    cause: str, known: dict[str, Any], expected: tuple[str, str]
) -> None:
    code = 75 if cause == "budget" else 70
    told = record(code, cause, message="it said so", **known)
    found = diagnose(scene([ended_pod(1, code, record=told)], state=FAILED))
    logs, again = found.commands
    assert logs.startswith("kdist logs digits -n ml")
    assert (found.change, again) == expected
