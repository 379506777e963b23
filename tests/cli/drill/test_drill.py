"""What a drill makes of a job before it does anything."""

from __future__ import annotations

from typing import Any, cast

from kdist.drill import drill
from kdist.drill.command import command
from kdist.drill.faults import Situation
from kdist.drill.report import Ledger
from kdist.drill.target import DrillTarget


def test_the_help_says_how_long_a_job_may_take_to_train_again() -> None:
    assert f"({drill.TIMEOUT / 60:g}m)" in (command.help or "")


class _Place:
    """A job that trains, whose agent may not be asked about a file system."""

    checkpoints = "s3://bucket/runs/digits"

    def look(self) -> Situation:
        return Situation("digits", "cluster", {}, ("digits-0",), {"digits-0": {}})

    def find_drill(self) -> str:
        return ""

    def read_ledger(self) -> Ledger:
        return Ledger()

    def require_rights(self, fault: str) -> None:
        assert fault == "disk-full"


def test_there_is_no_file_system_that_a_drill_could_fill() -> None:
    found: Any = drill.examine(cast(DrillTarget, _Place()), "disk-full")
    assert found.disk == "its checkpoints are in a bucket, so there is no file system to fill"
