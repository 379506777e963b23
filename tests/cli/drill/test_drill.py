"""What a drill makes of a job before it does anything."""

from __future__ import annotations

from kdist.drill import drill
from kdist.drill.command import command


def test_the_help_says_how_long_a_job_may_take_to_train_again() -> None:
    assert f"({drill.TIMEOUT / 60:g}m)" in (command.help or "")
