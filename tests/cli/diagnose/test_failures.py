"""How a job ended, or why it does not get on, is told by the first failure that decides and not by
what followed from it.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist.diagnose import KEY_MISSING, Diagnosis, diagnose
from kdist.status import Phase, Snapshot, WorkloadState
from tests.cli.diagnose.scenes import FAILED, asking, event, node, nodes, scene
from tests.cli.status.objects import (
    NOW,
    Document,
    at,
    config_map,
    container,
    ended_pod,
    lost_pod,
    pod,
    record,
    report,
    terminated,
    unscheduled,
    waiting,
    workload,
)

FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"
SUCCEEDED = WorkloadState(succeeded=2, finished="succeeded")
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/code/train.py", line 7, in loss',
    "ValueError: label 12 is out of range",
]
PEERS = record(
    201, "node_lost", message="RuntimeError: Connection closed by peer", primary=False, rank=0
)


def failed(code: int, cause: str, message: str = "it said so", **more: Any) -> Snapshot:
    """A job that one exit record ended."""
    reported = record(code, cause, message=message, **more)
    return scene(
        [ended_pod(0, 201, record=PEERS), ended_pod(1, code, record=reported)], state=FAILED
    )


def failed_alone(*pods: Document) -> Snapshot:
    """A job that failed and has these pods left."""
    return scene(list(pods), state=FAILED)


LABEL = "ValueError: label 12 is out of range"
DEALT = "train.globalBatch: 3 samples cannot be dealt"
UNKNOWN_KEY = "train.gradSpikeFactor Extra inputs are not permitted"
FOREIGN = "another model or optimizer; give the job a folder of its own, or --fresh"
SHAPES = "another model: a.weight is (1,) instead of (2,); b.weight is (3,) instead of (4,)"
OPTION = "train.options.dim: Extra inputs are not permitted"
SPENT = "restart limit reached: 10 restarts without progress; the last failure: SIGKILL"
EXITED = "rank 1 exited with code 1"
UNLOADABLE = "UnloadableStateError: state.fn is a function"
PARTED = "ReplicasDifferError: rank 1 holds other weights"
IMPORT = "ImportError: no module\nlast line"
LATE = WorkloadState(
    finished="failed", reason="DeadlineExceeded", message="Job was active too long"
)
WAITS = {"collective": "all_reduce #17 float32[1024]"}

CASES = [
    (
        failed(70, "user_code", LABEL, traceback=TRACEBACK),
        "user-code",
        ["rank 1", "train.py", "step 42"],
    ),
    (failed(64, "config", DEALT), "config", ["globalBatch", "job.yaml"]),
    (failed(64, "config", UNKNOWN_KEY), "config", ["another trainer version"]),
    (failed(65, "data", "the data set is empty"), "data", ["empty"]),
    (failed(73, "mismatch", FOREIGN), "mismatch", ["give the job a folder of its own"]),
    (failed(73, "mismatch", SHAPES), "mismatch", ["another checkpoint folder", "--fresh"]),
    (failed(64, "config", OPTION), "config", ["change job.yaml"]),
    (failed(74, "nan", "the loss is nan"), "nan", ["learning rate"]),
    (failed(75, "budget", SPENT), "budget", ["maxRestarts"]),
    (failed(71, "oom_device", "CUDA out of memory"), "oom-device", ["microBatch"]),
    (failed(72, "oom_host", "killed"), "out-of-memory", ["spec.resources.memory"]),
    (failed(202, "hang", "no progress", **WAITS), "hang", ["all_reduce #17"]),
    (failed(203, "storage", "No space left on device"), "storage", ["No space left"]),
    (failed(70, "unheard_of", "?"), "unknown", ["unheard_of", "ended (unheard_of)"]),
    (failed(75, "preempted", "asked to end", rank=None), "preempted", ["digits-1", "maxRestarts"]),
    (failed(70, "user_code", EXITED), "user-code", [EXITED]),
    (failed(73, "mismatch", UNLOADABLE), "mismatch", ["could not be given back"]),
    (failed(206, "retry", PARTED, signature="replicas-differ"), "retry", ["no longer held"]),
    (failed_alone(ended_pod(0, 1, record=IMPORT)), "crash", ["exit code 1", "last line"]),
    (failed_alone(ended_pod(0, 137)), "crash", ["signal 9"]),
    (failed_alone(), "failed", ["exit code that is not retried"]),
    (scene([], state=LATE), "failed", ["activeDeadlineSeconds"]),
]


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    CASES,
    ids=[f"{index}-{case[1]}" for index, case in enumerate(CASES)],
)
def test_the_end_is_explained_with_its_way_out(
    seen: Snapshot, cause: str, words: list[str]
) -> None:
    found = diagnose(seen)
    assert (found.cause, found.severity) == (cause, "failed")
    reported = " ".join([found.sentence, found.fix, *found.evidence])
    assert [word for word in words if word not in reported] == []
    assert found.fix
    assert found.commands


def test_what_to_change_before_a_checkpoint_fits_again_names_the_ways_out() -> None:
    told = failed(73, "mismatch", f"{SHAPES}; take another folder, or --fresh", rerun="fixed")
    found = diagnose(told)
    assert found.fix == "take another folder, or --fresh"
    assert found.change == "do what the fix says"
    assert "instead of" not in diagnose(failed(73, "mismatch", SHAPES, rerun="fixed")).fix


def test_memory_of_one_rank_comes_before_the_peers_that_lost_it() -> None:
    hungry = asking(ended_pod(1, 137, "OOMKilled"), memory="4Gi")
    found = diagnose(scene([ended_pod(0, 201, record=PEERS), hungry], state=FAILED))
    assert (found.cause, found.also) == ("out-of-memory", ())
    assert "digits-1-abcde used more memory than the limit of 4.0 GiB" in found.sentence
    assert "digits-0-abcde only lost their peer" in found.evidence


def test_of_a_hang_that_spent_the_budget_the_place_is_shown_and_not_the_end_of_its_stacks() -> None:
    stacks = ["Thread 0x1 (most recent call first):", "  _wait", ""]
    stacks += ["Current thread 0x2 (most recent call first):", "  loss", *["x"] * 30]
    printed = "restart limit reached: 0 restarts without progress; the last failure: rank 1 hangs"
    spent = record(75, "budget", message=printed, traceback=stacks)
    found = diagnose(scene([ended_pod(0, 75, record=spent)], state=FAILED))
    assert found.evidence[1:3] == ("Current thread 0x2 (most recent call first):", "  loss")


def test_memory_comes_before_the_budget_that_it_spent() -> None:
    spent = record(75, "budget", message="restart limit reached: 10 restarts without progress")
    killed = ended_pod(1, 137, "OOMKilled", ago=30)
    found = diagnose(scene([ended_pod(0, 75, record=spent), killed], state=FAILED))
    assert (found.cause, [each.cause for each in found.also]) == ("out-of-memory", ["budget"])


def test_a_failure_before_a_pod_ran_out_of_memory_is_the_cause() -> None:
    early = record(70, "user_code", message="ValueError", time=NOW.timestamp() - 100)
    killed = ended_pod(1, 137, "OOMKilled", ago=5)
    found = diagnose(scene([ended_pod(0, 70, record=early, ago=99), killed], state=FAILED))
    assert found.cause == "user-code"


def test_a_container_that_ran_out_of_memory_and_trains_again_is_worth_a_word_only() -> None:
    before = terminated(137, "OOMKilled")
    runs = container(state={"running": {"startedAt": at(5)}}, ready=True, restarts=1, before=before)
    again = pod(1, phase="Running", containerStatuses=[runs])
    found = diagnose(scene([pod(0), again], reports={FIRST: report(), SECOND: report(ranks=(1,))}))
    assert (found.cause, [each.cause for each in found.also]) == ("none", ["out-of-memory"])


def test_a_crash_loop_points_at_the_log_before() -> None:
    before = terminated(1, "Error", "boom")
    crashing = pod(0, **waiting("CrashLoopBackOff", "back-off 40s", restarts=4, before=before))
    found = diagnose(scene([crashing]))
    assert (found.cause, found.severity) == ("crash", "blocked")
    assert found.commands[0] == "kdist logs digits -n ml --pod digits-0-abcde --previous"


@pytest.mark.parametrize("made", [None, -10.0, 1e6])
def test_a_service_account_that_is_gone_comes_before_the_hang_that_it_causes(
    made: float | None,
) -> None:
    account = {} if made is None else {"metadata": {"creationTimestamp": at(made)}}
    running = pod(0)
    running["metadata"] = {**running["metadata"], "creationTimestamp": at(3600)}
    running["spec"] = {
        **running["spec"],
        "serviceAccountName": "digits",
        "volumes": [{"name": "token"}],
    }
    found = diagnose(scene([running], accounts={"digits": account}, reports={}))
    if made == 1e6:  # older than the pod
        assert found.cause != "account-gone"
        return
    assert found.cause == "account-gone"
    assert found.commands == ("kdist restart digits -n ml",)
    assert ("does not exist" in found.sentence) == (made is None)
    assert ("kdist apply" in found.fix) == (made is None)


def test_agents_that_are_refused_are_told_though_they_train_and_their_account_exists() -> None:
    refused = {**report(), "rendezvous_refused": True}
    seen = scene([pod(0), pod(1)], reports={FIRST: refused, SECOND: report(ranks=(1,))})
    assert (seen.status.phase, seen.status.reason) == (Phase.RUNNING, "RendezvousRefused")
    found = diagnose(seen)
    assert (found.cause, found.severity) == ("account-gone", "waiting")
    assert found.evidence == (f"pod/{FIRST}: rendezvous_refused",)
    for value in (False, "yes", 1, None):
        odd = {**report(), "rendezvous_refused": value}
        calm = scene([pod(0), pod(1)], reports={FIRST: odd, SECOND: report(ranks=(1,))})
        assert diagnose(calm).cause == "none"


LOST = [pod(0), lost_pod(1)]
SILENT = nodes(node("worker-2", ready="Unknown", ago=180))


def test_a_lost_node_that_the_job_needs_is_named_with_the_two_commands_that_help() -> None:
    found = diagnose(scene(LOST, reports={FIRST: report("rendezvous")}, nodes=SILENT))
    assert (found.cause, found.severity) == ("node-lost", "blocked")
    assert found.sentence == (
        "node worker-2 does not answer since 3:00; digits-1-abcde is on it, it needs 2 "
        "nodes and has 1"
    )
    assert found.fix.endswith("with nodes {min: 1, max: 2} the others would continue")
    assert found.commands == ("kdist recover digits -n ml", "kubectl delete node worker-2")
    assert found.evidence[0].startswith(
        "node/worker-2: Ready is Unknown: NodeStatusUnknown: Kubelet stopped posting"
    )


def test_a_lost_node_is_found_where_nodes_may_not_be_read() -> None:
    reported = event("NodeNotReady", "Node is not ready", name=SECOND)
    found = diagnose(scene(LOST, reported, reports={FIRST: report("rendezvous")}))
    assert found.cause == "node-lost"
    assert found.evidence == ("pod/digits-1-abcde: NodeNotReady: Node is not ready",)


def test_an_elastic_job_that_goes_on_without_a_node_is_well() -> None:
    found = diagnose(
        scene(
            LOST, reported=config_map(least=1), reports={FIRST: report(generation=2)}, nodes=SILENT
        )
    )
    assert (found.cause, found.severity) == ("none", "fine")
    assert [(each.cause, each.severity) for each in found.also] == [("node-lost", "waiting")]


def test_a_rendezvous_names_who_is_missing() -> None:
    late = pod(1, phase="Pending", **waiting("ContainerCreating"))
    found = diagnose(scene([pod(0), late], reports={FIRST: report("rendezvous", step=None)}))
    assert found.cause == "rendezvous"
    assert (
        found.sentence
        == "1 of 2 needed nodes are at the rendezvous; missing: digits-1-abcde (ContainerCreating)"
    )


def test_a_pod_without_a_node_is_the_reason_of_a_rendezvous_that_waits() -> None:
    absent = asking(unscheduled(1, "0/2 nodes are available: 2 Insufficient cpu."), cpu="4")
    found = diagnose(scene([pod(0), absent], reports={FIRST: report("rendezvous", step=None)}))
    assert (found.cause, found.also) == ("unschedulable", ())


def test_agents_that_refuse_many_connections_are_named_beside_what_the_job_does() -> None:
    flooded = {**report(), "connections_refused": 18963}
    quiet = {**report(ranks=(1,)), "connections_refused": 3}
    found = diagnose(scene([pod(0), pod(1)], reports={FIRST: flooded, SECOND: quiet}))
    assert found.cause == "none"
    (also,) = found.also
    assert also.cause == "connections-refused"
    assert "agents have closed 18,963 connections" in also.sentence
    assert also.evidence == (f"pod/{FIRST}: 18,963 refused",)
    assert diagnose(scene([pod(0), pod(1)], reports={FIRST: quiet})).also == ()


def test_a_missing_key_of_the_exchange_is_a_note_and_never_the_cause() -> None:
    keyless, keyed = {**report(), "exchange_key": False}, {**report(), "exchange_key": True}
    found = diagnose(scene([pod(0), pod(1)], reports={FIRST: keyless}))
    assert found.cause == "none"
    (also,) = found.also
    assert also.cause == "exchange-key-missing"
    assert also.evidence == (f"pod/{FIRST}: no key is mounted",)
    assert "create secrets" in also.fix
    assert diagnose(scene([pod(0), pod(1)], reports={FIRST: keyed})).also == ()

    told = event(KEY_MISSING, "secret/digits-exchange-a could not be created", kind="TrainingJob")
    found = diagnose(scene([pod(0), pod(1)], told, reports={FIRST: report()}))
    assert [each.cause for each in found.also] == ["exchange-key-missing"]
    assert "could not be created" in found.also[0].evidence[0]
    assert diagnose(scene([pod(0), pod(1)], told, reports={FIRST: keyed})).also == ()

    waits = scene([unscheduled(0, "0/3 nodes are available: 3 Insufficient cpu.")], told)
    found = diagnose(waits)
    assert found.cause == "unschedulable"
    assert [each.cause for each in found.also] == ["exchange-key-missing"]
    silent = diagnose(scene([pod(0), pod(1)], told))
    assert silent.cause == "no-answer"


def standing(*silences: float, **more: object) -> Diagnosis:
    """Of a job whose rank 1 stands still and whose rank 0 waits for it in an all-reduce, for so
    many seconds.
    """
    first, second = report(), report(ranks=(1,))
    waits = {"collective": "all_reduce(float32[1024]) #17"}
    first["ranks"][0] |= {"heartbeat_age": silences[0], **waits}
    second["ranks"][0] |= {"heartbeat_age": silences[1]}
    return diagnose(scene([pod(0), pod(1)], reports={FIRST: first | more, SECOND: second | more}))


def test_a_stall_is_reported_from_its_first_seconds_on_with_who_waits_where_and_what_comes() -> (
    None
):
    found = standing(8.0, 8.5)
    assert (found.cause, found.severity) == ("hang", "waiting")
    assert found.sentence == (
        "no step has finished for 8.0 s, where a step usually takes 0.2 s: rank 1 hangs in "
        "phase step, in no collective; rank 0 waits in all_reduce(float32[1024]) #17; in 4:52 at "
        "the earliest (spec.hangTimeoutSeconds: 300) the agents write the stacks to the log and "
        "start the ranks again"
    )
    assert found.evidence[0] == "rank 1 in phase step: silent for 8.5 s"
    assert found.commands[0] == "kdist logs digits -n ml --rank 1 --tail 100"


@pytest.mark.parametrize(("usual", "phase"), [(0.2, "save"), (6.0, "step"), (None, "init")])
def test_a_long_step_and_a_long_save_are_no_stall(usual: float | None, phase: str) -> None:
    reported = report()
    reported["ranks"][0] |= {"heartbeat_age": 20.0, "step_seconds": usual, "phase": phase}
    assert diagnose(scene([pod(0), pod(1)], reports={FIRST: reported})).cause == "none"
    reported["ranks"][0]["heartbeat_age"] = 31.0
    assert diagnose(scene([pod(0), pod(1)], reports={FIRST: reported})).cause == "hang"


def test_ranks_that_the_agents_have_found_hanging_are_named() -> None:
    found = standing(305.0, 305.0, state="hung")
    assert found.cause == "hang"
    assert found.sentence.endswith(
        "their agents have written the stacks to the log and start them again"
    )


def test_an_eviction_says_who_did_it() -> None:
    printed = "The node was low on resource: ephemeral-storage."
    evicted = pod(0, phase="Failed", reason="Evicted", message=printed)
    found = diagnose(scene([evicted], state=FAILED))
    assert found.cause == "evicted"
    assert "ephemeral-storage" in found.evidence[0]


def resting(asked: str) -> Snapshot:
    """A job that somebody has asked to rest."""
    return scene([], state=WorkloadState(suspended=True), reported=config_map(asked=asked))


def test_a_suspended_job_names_the_step_that_its_pods_have_saved() -> None:
    seen = resting("suspended 719")
    assert seen.status.last_checkpoint_step == 719
    assert diagnose(seen).sentence == "digits is suspended; step 719 is saved"
    unreadable = resting("suspended " + "9" * 5000)
    assert unreadable.status.last_checkpoint_step is None


BOTH_DONE = {FIRST: report("succeeded"), SECOND: report("succeeded")}


@pytest.mark.parametrize(
    ("seen", "cause", "command"),
    [
        (resting("suspended"), "suspended", "kdist resume digits -n ml"),
        (
            scene([ended_pod(0, 200, record=record(200, "preempted"))], state=FAILED),
            "stopped",
            "kdist restart digits -n ml",
        ),
        (scene([ended_pod(0, 0)], state=SUCCEEDED), "done", None),
        (scene([pod(0), pod(1)], reports=BOTH_DONE), "done", None),
        (Snapshot("digits", "ml", config_map()), "no-workload", "kdist apply JOB.yaml -n ml"),
        (scene([pod(0), pod(1)]), "no-answer", "kdist logs digits -n ml --tail 20"),
    ],
)
def test_what_rests_is_over_or_cannot_be_asked_is_said(
    seen: Snapshot, cause: str, command: str | None
) -> None:
    found = diagnose(seen)
    assert (found.cause, next(iter(found.commands), None)) == (cause, command)


def test_a_job_that_trains_reports_its_pace() -> None:
    found = diagnose(scene([pod(0), pod(1)], reports={FIRST: report(), SECOND: report(ranks=(1,))}))
    pace = "step 120 of 500, 0.2 s each, 2,000 samples/s, loss 0.25, 2/2 nodes"
    assert found.sentence == f"nothing is wrong: digits trains ({pace})"


def test_a_job_with_fewer_pods_than_it_needs_is_not_said_to_be_right() -> None:
    found = diagnose(scene([pod(0), pod(1, phase="Pending")], reports={FIRST: report()}))
    assert found.cause == "nodes-missing"
    assert found.sentence == "digits has 1 of the 2 nodes that it needs"


def test_a_diagnosis_is_plain_for_programs() -> None:
    document = diagnose(failed(70, "user_code")).to_document()
    assert document["cause"] == "user-code"
    assert document["severity"] == "failed"
    assert document["also"] == []
    assert isinstance(document["evidence"], list)


def test_the_operators_own_object_is_never_needed() -> None:
    seen = scene([pod(0), pod(1)], over=workload(kind="PyTorchJob"), reports={FIRST: report()})
    assert diagnose(seen).cause == "none"


def test_a_job_that_failed_and_has_no_pod_left_is_sent_to_the_log_that_was_kept() -> None:
    assert diagnose(scene([], state=LATE)).commands[0] == "kdist logs digits -n ml"
    assert diagnose(scene([pod(0)], state=LATE)).commands[0].endswith("--previous")


def test_the_advice_of_an_exit_record_comes_before_kdists_own_fix() -> None:
    found = diagnose(failed(70, "user_code", LABEL, advice="install it with pip install einops"))
    assert found.fix == "install it with pip install einops"
    for cause in ("node", "loader", "early_exit", "device"):
        assert diagnose(failed(70, cause, "it said so")).cause == cause.replace("_", "-")
