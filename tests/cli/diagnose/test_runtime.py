"""Of containers that run, hangs are told from training, and warnings of Kubernetes are shown."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.diagnose import Diagnosis, diagnose
from kdist.status import Snapshot, WorkloadState
from tests.cli.diagnose.scenes import FAILED, creating, event, scene
from tests.cli.status.objects import Document, ended_pod, pod, record, report


def test_ranks_without_a_process_group_are_said_of_a_job_that_is_done() -> None:
    ended = record(0, None, outcome="done", separate_ranks=2)
    pods = [ended_pod(0, 0, record=ended), ended_pod(1, 0, record=ended)]
    found = diagnose(scene(pods, state=WorkloadState(succeeded=2, finished="succeeded")))
    assert found.cause == "done"
    assert "none of its 2 ranks has formed a process group" in found.sentence
    assert "init_process_group()" in found.fix


def test_a_loss_that_was_not_finite_is_said_of_a_job_that_is_done() -> None:
    ended = record(0, None, outcome="done")
    told = record(0, None, outcome="done", nonfinite_loss={"steps": 19, "last": "nan"})
    found = diagnose(
        scene(
            [ended_pod(0, 0, record=ended), ended_pod(1, 0, record=told)],
            state=WorkloadState(succeeded=2, finished="succeeded"),
        )
    )
    assert found.cause == "done"
    assert "NaN or infinite in 19 reported steps, and is nan at the end" in found.sentence


def test_a_failure_says_too_that_the_loss_was_not_finite_before() -> None:
    ended = record(70, "user_code", nonfinite_loss={"steps": 1, "last": None})
    found = diagnose(scene([ended_pod(0, 70, record=ended)], state=FAILED))
    assert "the loss was NaN or infinite in 1 reported step" in found.evidence


FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"
SUM = "all_reduce(float32[1]) #1"


def script_rank(rank: int, **more: Any) -> Document:
    """The report of a script's agent, which knows only what `more` says of its rank."""
    told = report(ranks=(rank,))
    told |= dict.fromkeys(("step", "target_steps", "loss", "learning_rate", "samples_per_second"))
    told |= dict.fromkeys(("last_checkpoint_step", "last_checkpoint_time"))
    fields = ("step", "step_seconds", "busy_seconds", "all_reduce_seconds", "phase")
    told["ranks"] = [
        {"rank": rank, "local_rank": 0, **dict.fromkeys((*fields, "heartbeat_age")), **more}
    ]
    return told


def look(first: dict[str, Any], second: dict[str, Any]) -> Diagnosis:
    reports = {FIRST: script_rank(0, **first), SECOND: script_rank(1, **second)}
    return diagnose(scene([pod(0), pod(1)], reports=reports))


WAITS = {"collective": SUM, "collective_seconds": 125.0, "quiet_seconds": 125.0}
STANDS = {"line": "faulty.py:24 in <module>", "line_seconds": 110.0}


def test_a_script_that_hangs_names_who_waits_in_what_and_where_the_other_stands() -> None:
    found = look(STANDS, WAITS)
    assert (found.cause, found.severity) == ("hang", "waiting")
    assert found.sentence.startswith(
        "rank 0 has been at faulty.py:24 in <module> for 1:50, while rank 1 has waited in "
        f"{SUM} for 2:05"
    )
    assert found.commands[0] == "kdist logs digits -n ml --rank 0 --tail 100"


def test_ranks_of_which_none_has_a_process_group_are_not_said_to_train_alone() -> None:
    steps = {"step": 3, "phase": "step", "heartbeat_age": 0.2, "quiet_seconds": 0.2}
    found = look({**steps, "group": False}, {**steps, "group": False})
    assert (found.cause, found.severity) == ("separate-ranks", "waiting")
    assert "none of its 2 ranks has formed a process group" in found.sentence
    for other in (True, None):
        assert look({**steps, "group": False}, {**steps, "group": other}).cause == "none"


def test_where_a_rank_stands_is_said_to_be_unknown() -> None:
    found = look({}, WAITS)
    assert "rank 0 is in no collective, and where it stands is not known" in found.sentence


def test_ranks_in_one_collective_and_in_different_ones_are_told_apart() -> None:
    assert "all ranks are in it" in look(WAITS, WAITS).sentence
    other = look({**WAITS, "collective": "broadcast(float32[1]) #1"}, WAITS)
    assert "in different collectives" in other.sentence


def test_why_ranks_that_make_steps_wait_is_not_known_where_an_agent_does_not_answer() -> None:
    told = report(ranks=(1,))
    told["ranks"][0] |= {"heartbeat_age": 5.4, "collective": SUM}
    found = diagnose(scene([pod(0), pod(1)], reports={FIRST: told}))
    assert (found.cause, found.severity) == ("hang", "waiting")
    words = f"{SECOND} may keep them waiting: no agent answers there, so why is not known"
    assert words in found.sentence
    both = {FIRST: told, SECOND: report()}
    assert "not known" not in diagnose(scene([pod(0), pod(1)], reports=both)).sentence


def test_what_agents_that_do_not_answer_know_is_not_known() -> None:
    seen = scene([pod(0), pod(1)], reports={FIRST: script_rank(0, **WAITS)})
    found = diagnose(seen)
    assert "what 1 other ranks do is not known" in found.sentence


def test_a_script_of_which_nothing_was_seen_is_not_said_to_train() -> None:
    found = look(STANDS, {})
    assert (found.cause, found.severity) == ("not-known", "waiting")
    assert "rank 0 is at faulty.py:24 in <module>" in found.sentence
    assert "have entered no collective" in found.sentence
    late = look({"quiet_seconds": 90.0}, {"quiet_seconds": 200.0})
    assert late.cause == "not-known"
    assert "began or ended 1:30 ago" in late.sentence


def test_a_script_that_starts_again_is_not_said_to_train_at_a_step_of_before() -> None:
    reports = {FIRST: script_rank(0, group=False), SECOND: script_rank(1, group=False)}
    for each in reports.values():
        each["step"] = 128
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert (found.cause, found.severity) == ("not-known", "waiting")
    assert "have entered no collective" in found.sentence


def test_a_script_whose_collectives_are_seen_trains() -> None:
    found = look({"quiet_seconds": 0.2}, {"quiet_seconds": 3.0})
    assert found.cause == "none"
    assert "it reports no steps; a collective was seen 0.2 s ago" in found.sentence


SANDBOX = 'failed to setup network for sandbox "1f": plugin type="bridge" failed'


def refused(reason: str, message: str) -> Document:
    """A pod that the kubelet has refused: no container of it ever ran."""
    return pod(0, phase="Failed", reason=reason, message=message)


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    [
        (
            scene(
                [creating(0), creating(1)],
                event("FailedCreatePodSandBox", SANDBOX, count=7),
            ),
            "warning",
            ["FailedCreatePodSandBox", "plugin type", "7 times"],
        ),
        (
            scene([creating(0), creating(1)], event("NeverHeardOf", "the moon is full")),
            "warning",
            ["NeverHeardOf: the moon is full"],
        ),
        (
            scene([], event("Odd", "no tokens left", kind="Job")),
            "warning",
            ["Odd: no tokens left"],
        ),
        *[
            (
                scene([refused(reason, message)], state=FAILED),
                "pod-refused",
                [reason, message, "never ran"],
            )
            for reason, message in (
                ("OutOfcpu", "Node didn't have enough resource: cpu, requested: 4000"),
                ("UnexpectedAdmissionError", "Allocate failed due to no devices"),
                ("NodeShutdown", "Pod was rejected as the node is shutting down."),
            )
        ],
    ],
)
def test_what_no_rule_knows_is_shown_as_it_is(seen: Snapshot, cause: str, words: list[str]) -> None:
    found = diagnose(seen)
    assert found.cause == cause
    told = " ".join([found.sentence, *found.evidence])
    assert [word for word in words if word not in told] == []
    assert "wait a moment" not in found.fix
    assert not any(command.startswith("kdist logs") for command in found.commands)


def test_a_warning_that_was_overcome_or_is_old_is_not_shown() -> None:
    early = event("FailedCreatePodSandBox", SANDBOX, ago=100)
    late = event("Pulling", "Pulling image", ago=10)
    assert diagnose(scene([creating(0), creating(1)], early, late)).cause == "starting"
    old = event("FailedCreatePodSandBox", SANDBOX, ago=2000)
    assert diagnose(scene([creating(0), creating(1)], old)).cause == "starting"
