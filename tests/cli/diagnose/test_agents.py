"""What agents tell of a full disk, then and now, and of machines that fail."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.diagnose import diagnose
from kdist.views.status_table import status_rows
from tests.cli.diagnose.scenes import scene
from tests.cli.status.objects import NOW, pod, report

from .test_losses import FIRST, OLD, waiting


def test_checkpoints_that_cannot_be_saved_come_before_that_it_trains() -> None:
    room = "storage: /ckpt (checkpoints) has 2.0 KiB free of 4.0 MiB: delete old checkpoints"
    failing = report(failed_saves=3, checkpoint_room=room)
    reports = {FIRST: failing, OLD: report(ranks=(1,))}
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert (found.cause, found.severity, found.fix) == (
        "storage",
        "blocked",
        "delete old checkpoints",
    )
    assert found.sentence.startswith(
        "digits trains at step 120, and 3 checkpoints could not be saved since step 100: "
        "storage: /ckpt (checkpoints) has 2.0 KiB free of 4.0 MiB"
    )


def test_a_full_disk_is_blocked_with_the_folder_and_what_is_to_be_freed() -> None:
    full = "storage: /ckpt (checkpoints) has 0 bytes free of 4.0 MiB: delete old checkpoints"
    failure = {
        "cause": "storage",
        "message": "OSError: No space left on device",
        "time": NOW.timestamp() - 9,
        "full": full,
        "is_full": True,
    }
    reports = waiting("restarting", last_failure=failure, waiting_for=f"{full}; retrying in 4 s")
    reports[OLD] = report("restarting", ranks=(1,))
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert (found.cause, found.severity) == ("storage", "blocked")
    assert "/ckpt (checkpoints) has 0 bytes free of 4.0 MiB" in found.sentence
    assert found.fix.startswith("delete old checkpoints")
    assert any("retrying in 4 s" in line for line in found.evidence)


@pytest.mark.parametrize("is_full", [None, False])
def test_what_was_full_is_of_then_unless_it_is_known_to_be_full_now(is_full: bool | None) -> None:
    full = "storage: /ckpt (checkpoints) has 0 bytes free of 4.0 MiB: delete old checkpoints"
    failure = {"cause": "storage", "time": NOW.timestamp() - 9, "full": full, "is_full": is_full}
    reports = waiting("restarting", last_failure=failure)
    reports[OLD] = report("restarting", ranks=(1,))
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert found.cause == "storage"
    assert "(checkpoints) had 0 bytes free of 4.0 MiB 9.0 s ago; committed" in found.sentence
    assert ("there is room again" in found.sentence) is (is_full is False)
    assert found.severity == ("blocked" if is_full is None else "waiting")


@pytest.mark.parametrize("since", [{"last_checkpoint_time": NOW.timestamp() - 2}, {"full": False}])
def test_what_was_full_is_not_told_of_a_job_that_has_saved_or_trains_with_room(
    since: dict[str, Any],
) -> None:
    full = "storage: /ckpt (checkpoints) has 0 bytes free of 4.0 MiB: delete old checkpoints"
    is_full = since.pop("full", None)
    failure = {"cause": "storage", "time": NOW.timestamp() - 9, "full": full, "is_full": is_full}
    reports = {FIRST: report(last_failure=failure, **since), OLD: report(ranks=(1,))}
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert (found.cause, found.also) == ("none", ())


def faults(machine: str, number: int) -> dict[str, Any]:
    told = {"cause": "device", "message": "CUDA error: uncorrectable ECC", "time": NOW.timestamp()}
    return {"machine": machine, "faults": number, **told}


def test_a_machine_that_fails_again_is_named_with_the_commands_that_keep_the_job_off_it() -> None:
    known = [faults("gpu-1", 1), faults("worker-2", 2)]
    failure = {"cause": "device", "rank": 1, "node": OLD, "machine": "worker-2", "primary": True}
    reports = {
        FIRST: report("restarting", machine_faults=known, last_failure=failure),
        OLD: report("restarting", ranks=(1,), machine_faults=known),
    }
    found = diagnose(scene([pod(0), pod(1, node="worker-2")], reports=reports))
    assert (found.cause, found.severity) == ("machine-faults", "waiting")
    assert found.sentence.startswith("a GPU of worker-2 has failed 2 times in this run")
    assert found.evidence == ("gpu-1: 1 fault, last device: CUDA error: uncorrectable ECC",)
    assert found.commands == (
        "kdist recover digits -n ml --avoid worker-2",
        "kubectl cordon worker-2",
    )
    (other,) = found.also
    assert f"rank 1 on {OLD} of machine worker-2 failed: device" in other.sentence


def test_what_is_wrong_now_comes_before_a_machine_that_failed_earlier() -> None:
    first = report(machine_faults=[faults("worker-2", 2)])
    second = report(ranks=(1,))
    first["ranks"][0] |= {"heartbeat_age": 8.0, "collective": "all_reduce(float32[1024]) #17"}
    second["ranks"][0] |= {"heartbeat_age": 8.5}
    found = diagnose(scene([pod(0), pod(1)], reports={FIRST: first, OLD: second}))
    assert found.cause == "hang"
    assert "machine-faults" in [each.cause for each in found.also]


def test_a_machine_that_has_failed_once_is_only_shown() -> None:
    reports = {FIRST: report(machine_faults=[faults("gpu-1", 1)]), OLD: report(ranks=(1,))}
    seen = scene([pod(0), pod(1)], reports=reports)
    assert (diagnose(seen).cause, diagnose(seen).also) == ("none", ())
    rows = dict(status_rows(seen.status))
    assert rows["faulty machine"] == "gpu-1: 1 fault, last device: CUDA error: uncorrectable ECC"
