"""The events of a run on a disk that refuses them for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist_trainer.agent.coordination import FolderEventLog
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.processes.threads import BoundedCalls


def test_events_that_the_folder_refuses_are_written_with_the_next_one_in_their_order(
    tmp_path: Path,
) -> None:
    obstacle = tmp_path / "ledger"
    obstacle.write_text("a file where the folder should be")
    log = FolderEventLog(RunLedger(tmp_path), BoundedCalls("the folder"))
    for number in (1, 2):
        with pytest.raises(OSError, match=r"directory|exists"):
            log.append("generation", generation=number, time=float(number))
    obstacle.unlink()
    log.append("generation", generation=3, time=3.0)
    assert [one["generation"] for one in log.events()] == [1, 2, 3]
    assert [one["time"] for one in log.events()] == [1.0, 2.0, 3.0], "when they happened"
    assert not log.write_late()
