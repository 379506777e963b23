"""Why a job, a pod or a worker group failed: exit records by their cause, memory, evictions, limits
of the workload, and the failures that agents report before they try again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kdist.diagnose.container_start import advise_on_size
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, Severity, clip, name_cause, name_pods
from kdist.status import (
    ContainerTermination,
    ExitRecord,
    Phase,
    Pod,
    documents,
    find_successor,
)
from kdist.status.pods import DONE, HANG, PEERS_LOST, STOPPED
from kdist.units import count, parse_quantity, size
from kdist_trainer.causes.advice import (
    ENDED_BY_ITSELF,
    GENERAL,
    PARTED,
    SLOW,
    SLOW_START,
    UNLOADABLE,
)

CAUSES: Final = {cause.value: words for cause, words in GENERAL.items()}
_SHOWN_LINES = 12  # of a traceback
_SHOWN_RANKS = 8  # groups of ranks that were in the same collective
_NEED_A_TRACEBACK = (
    "user_code",
    "unknown",
    "oom_device",
    "hang",
    "collective_timeout",
    "budget",
)  # others say all in their message
# the latter is of a pod whose node lost track of it
_HANDLED_ELSEWHERE = ("OOMKilled", "ContainerStatusUnknown")
_KILLED = (137, 143)  # by SIGKILL or SIGTERM
NODE_RESTARTED = 255  # of a container whose node was restarted, with the reason `Unknown`
_MEMORY_FIX = "raise spec.resources.memory, or lower train.microBatch or train.loader.workers"
_LEAST_FAULTS = 2  # of a machine, before it is named
_FRESH = 1800.0  # seconds for which a failure is reported after the job has recovered


def find_memory_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """A pod exceeded its memory limit; peers that were lost with it are consequences."""
    hit = [
        (pod, end)
        for pod in ctx.pods
        if (end := pod.ended or pod.before) is not None
        and end.reason == "OOMKilled"
        and _is_present(ctx, pod, end)
    ]
    record = ctx.status.exit_record
    if not hit:
        if record is None or record.cause != "oom_host" or not record.permanent:
            return None
        return Diagnosis(
            "out-of-memory",
            f"{_where(record)} used more memory than is available and was killed",
            "failed",
            _evidence(record),
            _MEMORY_FIX,
            (ctx.kdist("logs", *_rank(record)),),
        )
    pod, end = min(hit, key=lambda one: one[1].at or 0.0)
    if (
        record
        and record.permanent
        and record.cause not in ("oom_host", "budget")
        and (record.time or 0.0) < (end.at or 0.0)
    ):
        return None  # something else came first
    containers = documents.items(ctx.document(pod), "spec", "containers")
    own = next((each for each in containers if documents.text(each, "name") == pod.container), {})
    limit = parse_quantity(documents.at(own, "resources", "limits", "memory"))
    had = f" of {size(limit)}" if limit else ""
    ranks = ", ".join(str(rank.rank) for rank in ctx.status.ranks if rank.pod == pod.name)
    others = [
        each
        for each in ctx.pods
        if each is not pod and each.record and each.record.code in (PEERS_LOST, HANG)
    ]
    evidence = [
        f"pod/{pod.name}: OOMKilled, exit code {end.code}"
        + (f", {ctx.ago(end.at)}" if end.at else "")
    ]
    evidence += [f"its ranks: {ranks}"] if ranks else []
    evidence += [f"{name_pods(others)} only lost their peer"] if others else []
    previous = ["--previous"] if pod.ended is None else []
    answers = any(ctx.seen.reports.values())
    return Diagnosis(
        "out-of-memory",
        (
            f"{name_pods([each for each, _ in hit])} used more memory than the limit{had} and "
            f"{'was' if len(hit) == 1 else 'were'} killed"
        ),
        "failed" if ctx.status.phase is Phase.FAILED else "blocked",
        tuple(evidence),
        f"{_MEMORY_FIX}; /dev/shm counts too",
        (
            ctx.kdist("logs", "--pod", pod.name, *previous),
            ctx.kdist("top", "-o", "prom") if answers else ctx.kdist("events"),
        ),
    )


def _is_present(ctx: DiagnosticContext, pod: Pod, end: ContainerTermination) -> bool:
    """Whether an end may explain what is so now: it is not long past, and the container which has
    taken its place has not trained, is not being ended, and was in no group that has failed. Where
    the pod in its place has ended too, a later checkpoint shows that the job has trained.
    """
    if end.at is None or ctx.status.phase.terminal:
        return True
    now = find_successor(pod, ctx.pods) or pod
    has_run = now.started is not None and now.started > end.at
    is_past = has_run and (
        now.deleting
        or _may_have_trained(ctx, now)
        or _has_trained(ctx, now)
        or ctx.has_failed_since(now.started or 0.0)
    )
    if now is not pod and now.over:
        is_past |= ctx.had_formed(now.created or ctx.now, ctx.status.last_checkpoint_time)
    return ctx.now - end.at < _FRESH and not is_past


def _may_have_trained(ctx: DiagnosticContext, pod: Pod) -> bool:
    """Whether a pod whose agent does not answer has run for long enough to have been in a group,
    while another pod is taken away: that explains what is so now in either case.
    """
    is_unknown = pod.running and pod.name not in ctx.seen.reports
    is_long = ctx.had_formed(pod.started or ctx.now, ctx.now)
    return is_unknown and is_long and any(each.deleting for each in ctx.pods if each is not pod)


def _has_trained(ctx: DiagnosticContext, pod: Pod) -> bool:
    """Whether the job has trained since the container of a pod started. Not where it trains now
    with enough pods: what was before is a further finding there.
    """
    since, status = pod.started or ctx.now, ctx.status
    if status.phase is Phase.RUNNING:
        return status.nodes.ready < status.nodes.min and ctx.had_formed(since, ctx.now)
    ranks = documents.items(ctx.seen.reports.get(pod.name), "ranks")
    stepped = any(documents.number(each, "step_seconds") is not None for each in ranks)
    return ctx.stuck and (stepped or ctx.had_formed(since, status.last_checkpoint_time))


def find_failure(ctx: DiagnosticContext) -> Diagnosis | None:
    """The cause of the exit record: the root cause over all ranks."""
    record = ctx.status.exit_record
    if record is None or record.cause in ("node_lost", "rendezvous"):
        return None
    return _explain_record(ctx, record)


def find_lost_peers(ctx: DiagnosticContext) -> Diagnosis | None:
    """An exit record says only that peers were lost or never came, and nothing else was found."""
    record = ctx.status.exit_record
    if record is None or record.cause not in ("node_lost", "rendezvous"):
        return None
    return _explain_record(ctx, record)


def _explain_record(ctx: DiagnosticContext, record: ExitRecord) -> Diagnosis | None:
    counts = ctx.status.phase is Phase.FAILED or record.permanent or ctx.stuck
    if record.code in (DONE, STOPPED) or not counts:
        return None
    words, fix = _texts(record)
    if fix == CAUSES["user_code"].advice:
        fix = f"{fix}: {ctx.continuation}"
    fix = record.advice or fix
    collective = f" inside {record.collective}" if record.collective else ""
    sentence = words.format(
        where=_where(record),
        message=clip(record.message, 300) or f"exit code {record.code}",
        collective=collective,
    )
    severity: Severity = "failed" if ctx.status.phase is Phase.FAILED else "blocked"
    is_unknown = "Extra inputs are not permitted" in record.message
    if record.cause == "config" and is_unknown and "train.options." not in record.message:
        fix = "kdist-trainer has another version than this kdist: install the same"
        if ctx.status.location == "cluster":
            fix = (
                "the image has another trainer version than this kdist: rebuild the image, "
                "and set spec.image"
            )
    way_out = re.search(r"; ([^;]*--[a-z][^;]*)$", record.message)
    if fix == CAUSES["mismatch"].advice and way_out:
        fix = way_out[1]
    # where the container has started again, the record is of the instance before
    pod = next((each for each in ctx.pods if each.name == record.node), None)
    previous = ["--previous"] if pod is not None and pod.ended is None else []
    commands = [ctx.kdist("logs", *_rank(record), *previous)]
    change = ""
    if severity == "failed":
        again, change = ctx.start_again(record)
        commands.append(again)
    evidence = _evidence(record)
    cause = name_cause(record.signature if record.signature == SLOW_START else record.cause)
    if cause == "node-lost":
        cause = "peers-lost"  # which node or pod was lost is another cause
    return Diagnosis(cause, sentence, severity, evidence, fix, tuple(commands), change)


def _texts(record: ExitRecord) -> tuple[str, str]:
    """Sentence and fix. A cause that only a newer trainer knows is shown as it is."""
    words, fix = CAUSES.get(record.cause, CAUSES["unknown"])
    if record.cause not in CAUSES:
        words = f"{{where}} ended ({record.cause or 'unknown'}): {{message}}"
    if record.cause == "user_code" and re.match(r"rank \d+ (exited|left) with", record.message):
        words = ENDED_BY_ITSELF
    if record.cause == "mismatch" and "UnloadableStateError" in record.message:
        return UNLOADABLE
    if record.signature == "replicas-differ":
        return PARTED
    if record.signature == SLOW_START:
        return SLOW
    return words, fix


def _where(record: ExitRecord) -> str:
    parts = [
        f"rank {record.rank}" if record.rank is not None else "" if record.node else "a rank",
        f"on {record.node}" if record.node and record.rank is not None else record.node,
    ]
    parts.append(f"at step {record.step}" if record.step is not None else "")
    return " ".join(part for part in parts if part)


def _evidence(record: ExitRecord) -> tuple[str, ...]:
    cut = "" if record.whole else ", cut short"
    lines = [f"exit record: cause {record.cause}, code {record.code}{cut}"]
    if record.nonfinite_loss is not None:
        lines.append(f"the loss was {record.nonfinite_loss}")
    lines += record.collectives[:_SHOWN_RANKS]
    if record.cause in _NEED_A_TRACEBACK:
        # the end of a traceback; of a hang the first stacks, which start with the latest call
        trace = record.traceback
        stacks = [index for index, line in enumerate(trace) if line.startswith("Current thread")]
        lines += trace[stacks[0] :][:_SHOWN_LINES] if stacks else trace[-_SHOWN_LINES:]
    return tuple(lines)


def _rank(record: ExitRecord) -> list[str]:
    return ["--rank", str(record.rank)] if record.rank is not None else []


def find_crash(ctx: DiagnosticContext) -> Diagnosis | None:
    """A container crashes repeatedly, or has ended, without an exit record."""
    over = ctx.status.phase is Phase.FAILED
    for pod in ctx.pods:
        end = pod.ended or (pod.before if pod.reason == "CrashLoopBackOff" else None)
        if (
            end is None
            or end.code == 0
            or end.record
            or end.reason in _HANDLED_ELSEWHERE
            or (not ctx.stuck and not over)
            or (not over and (pod.deleting or ctx.is_replaced(pod)))
        ):
            continue
        signaled = 128 < end.code < 160
        how = f"by signal {end.code - 128}" if signaled else f"with exit code {end.code}"
        lines = [line for line in end.message.splitlines() if line.strip()][-_SHOWN_LINES:]
        previous = ["--previous"] if pod.ended is None else []
        fix = "see its log; the image must start kdist's trainer"
        if end.code in _KILLED or end.code == NODE_RESTARTED:
            fix = "it was ended from outside: see the events of the pod and of its node" + (
                f" {pod.node}" if pod.node else ""
            )
        return Diagnosis(
            "crash",
            f"the container of {pod.name} ended {how} and left no exit record",
            "failed" if over else "blocked",
            (f"pod/{pod.name}: {end.reason or pod.reason}", *lines),
            fix,
            (
                ctx.kdist("logs", "--pod", pod.name, *previous),
                ctx.kubectl("describe", "pod", pod.name),
            ),
        )
    return None


EVICTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "Evicted": (
        "the node was short of resources",
        "request in spec.resources what the pod uses; keep big files off the node's disk",
    ),
    "PreemptionByScheduler": (
        "a pod with a higher priority took its place",
        "give spec.priorityClass a higher one, or wait",
    ),
    "EvictionByEvictionAPI": ("its node is being drained", "nothing: it starts again elsewhere"),
    "DeletionByTaintManager": (
        "its node was tainted or stopped responding",
        "nothing, if the job continues; else check the node",
    ),
    "TerminationByKubelet": (
        "the kubelet ended it for lack of resources, or to shut down",
        "see the node",
    ),
}


def find_eviction(ctx: DiagnosticContext) -> Diagnosis | None:
    """A pod was evicted from its node. One that was replaced since explains only the end."""
    record, over = ctx.status.exit_record, ctx.status.phase is Phase.FAILED
    if (not ctx.stuck and not over) or (record is not None and record.permanent):
        return None
    for pod in ctx.pods:
        reason = "Evicted" if pod.state == "Evicted" else pod.reason
        past = not over and ctx.is_replaced(pod)
        if reason in EVICTIONS and not pod.lost and not past:
            why, fix = EVICTIONS[reason]
            message = pod.message or documents.text(ctx.document(pod), "status", "message")
            return Diagnosis(
                "evicted",
                f"{pod.name} was evicted from node {pod.node or '?'}: {why}",
                "waiting",
                (f"pod/{pod.name}: {reason}: {clip(message)}",),
                advise_on_size(message) or fix,
                (ctx.kdist("events"),),
            )
    return None


_LIMITS = {
    "DeadlineExceeded": (
        "it exceeded its activeDeadlineSeconds",
        "raise the deadline, then apply and restart",
    ),
    "BackoffLimitExceeded": ("its pods failed too often", "see the first failure in the logs"),
    "PodFailurePolicy": (
        "a container ended with an exit code that is not retried",
        "see its log",
    ),
    "MaxFailedIndexesExceeded": (
        "too many of its pods failed for good",
        "see the first failure in the logs",
    ),
    "FailedJobs": ("one of its Jobs failed", "see the first failure in the logs"),
}


def find_limit(ctx: DiagnosticContext) -> Diagnosis | None:
    """The workload failed, and its own reason is all that is known."""
    state = ctx.seen.state
    if ctx.status.phase is not Phase.FAILED or state is None:
        return None
    words, fix = _LIMITS.get(state.reason, ("", "see the logs and the events"))
    words = words or clip(state.message, 200) or state.reason or "its workload does not say why"
    evidence = (f"{state.reason or 'Failed'}: {clip(state.message)}",)
    # without a pod, the log that was kept next to the checkpoints
    previous = ["--previous"] if ctx.pods else []
    commands = (ctx.kdist("logs", *previous), ctx.kdist("events"))
    return Diagnosis("failed", f"the job failed: {words}", "failed", evidence, fix, commands)


FOLLOWS: Final = ("node_lost", "collective_timeout", "rendezvous")
"""Causes that tell only that something else was lost."""


def find_full_disk(ctx: DiagnosticContext) -> Diagnosis | None:
    """A folder of the training had no room when its group ended, and may have none now."""
    failure = ctx.status.last_failure
    if failure is None or not failure.full or ctx.status.phase.terminal:
        return None
    has_room = failure.is_full is False
    saved = ctx.status.last_checkpoint_time
    has_saved_since = saved is not None and failure.time is not None and saved > failure.time
    if (has_room and not ctx.stuck) or has_saved_since:
        return None
    first = failure.full.partition("; storage: ")[0]
    what, _, advice = first.removeprefix("storage: ").partition(": ")
    if not failure.is_full:
        what = f"{what.replace(' has ', ' had ')} {ctx.ago(failure.time)}".rstrip()
    lines = [f"the group failed {ctx.ago(failure.time)}".rstrip() + f": {failure.cause}"]
    lines += [clip(failure.message, 300)] if failure.message else []
    lines += [ctx.status.waiting_for] if ctx.status.waiting_for else []
    return Diagnosis(
        "storage",
        f"storage: {what}; committed checkpoints are safe"
        + ("; there is room again" if has_room else ""),
        "blocked" if ctx.stuck and not has_room else "waiting",
        tuple(lines),
        "wait a moment: the group starts again"
        if has_room
        else f"{advice}; then the training goes on by itself while restarts are left",
        (ctx.kdist("status", "-w"), ctx.kdist("logs", "--tail", "20")),
    )


def find_failed_saves(ctx: DiagnosticContext) -> Diagnosis | None:
    """The training goes on, and its checkpoints cannot be saved."""
    failed = ctx.status.failed_saves
    if not failed or ctx.status.phase is not Phase.RUNNING:
        return None
    saved, step = ctx.status.last_checkpoint_step, ctx.status.step
    since = f"since step {saved:,}" if saved is not None else "so far"
    room, _, advice = ctx.status.checkpoint_room.removeprefix("storage: ").partition(": ")
    why = f"storage: {room}" if room else "the log says why (checkpoint-failed)"
    at = f" at step {step:,}" if step is not None else ""
    what = f"{count(failed, 'checkpoint')} could not be saved {since}: {why}"
    if step is not None and step == ctx.status.target_steps:
        what = f"{why}: the finished training{at} waits to be saved, {what.partition(':')[0]}"
    else:
        what = f"{ctx.name} trains{at}, and {what}; a failure would lose the steps since then"
    return Diagnosis(
        "storage",
        what,
        "blocked",
        fix=advice or "free space, or repair the volume",
        commands=(ctx.kdist("logs", "--tail", "50"), ctx.kdist("status", "-w")),
    )


def find_slow_start(ctx: DiagnosticContext) -> Diagnosis | None:
    """The latest groups were all lost as they started, and so may be the present one."""
    status = ctx.status
    if not status.slow_start or status.phase.terminal:
        return None
    left = status.restarts_left
    remaining = f"{count(left, 'restart')} {'is' if left == 1 else 'are'} left" if left else ""
    end = f"; {remaining or 'no restart is left'}, then the job ends" if left is not None else ""
    failure = status.last_failure
    return Diagnosis(
        SLOW_START,
        f"{status.slow_start}{end}",
        "blocked",
        (f"the last loss: {failure.cause}: {clip(failure.message)}",) if failure else (),
        SLOW.advice,
        (ctx.kdist("events"), ctx.kdist("status", "-w")),
    )


def find_machine_faults(ctx: DiagnosticContext) -> Diagnosis | None:
    """The GPU or the node of one machine has failed again, and the job does not train."""
    return _describe_machine_faults(ctx) if _is_ended_by_machine(ctx) else None


def find_earlier_machine_faults(ctx: DiagnosticContext) -> Diagnosis | None:
    """They did so earlier: what keeps the job from training now, if anything, is something else."""
    return None if _is_ended_by_machine(ctx) else _describe_machine_faults(ctx)


def _is_ended_by_machine(ctx: DiagnosticContext) -> bool:
    failure = ctx.status.last_failure
    is_fault = failure is None or failure.cause in ("device", "node")
    return is_fault and ctx.status.phase is not Phase.RUNNING


def _describe_machine_faults(ctx: DiagnosticContext) -> Diagnosis | None:
    avoided = {each.node for each in ctx.status.avoided}
    known = [each for each in ctx.status.machine_faults if each.machine not in avoided]
    again = [each for each in known if each.faults >= _LEAST_FAULTS]
    if not again or ctx.status.phase is Phase.SUCCEEDED:
        return None
    last = again[-1]
    what = "a GPU of" if last.cause == "device" else "node"
    sentence = f"{what} {last.machine} has failed {count(last.faults, 'time')} in this run"
    fix, commands = "look at `nvidia-smi -q` there, and for Xid in its kernel log", []
    if ctx.status.location == "cluster":
        fix = f"keep this job off it, or cordon it for all; {fix}"
        commands = [ctx.kdist("recover", "--avoid", last.machine), f"kubectl cordon {last.machine}"]
    return Diagnosis(
        "machine-faults",
        f"{sentence}, last {ctx.ago(last.time)}: {clip(last.message, 300)}",
        "failed" if ctx.status.phase is Phase.FAILED else "waiting",
        tuple(str(each) for each in ctx.status.machine_faults if each is not last),
        fix,
        tuple(commands),
    )


def find_restart(ctx: DiagnosticContext) -> Diagnosis | None:
    """A failure has ended the worker group, and a new one forms."""
    failure = ctx.status.last_failure
    if failure is None or ctx.status.phase is not Phase.RECOVERING:
        return None
    follows = failure.cause in FOLLOWS or not failure.primary
    parts = [f"rank {failure.rank}" if failure.rank is not None else "an agent"]
    parts += [f"on {failure.node}"] if failure.node else []
    is_broken = failure.machine and failure.cause in ("device", "node")
    parts += [f"of machine {failure.machine}"] if is_broken else []
    parts += [f"at step {failure.step}"] if failure.step is not None else []
    where = " ".join(parts)
    if follows:
        sentence = f"{where} lost its peers, and which pod or node was lost is not known"
    else:
        sentence = f"{where} failed: {failure.cause}: {clip(failure.message, 300)}"
    ago = ctx.ago(failure.time)
    wait = ctx.status.waiting_for
    state = wait or ctx.status.message or "a new group forms"
    return Diagnosis(
        "peers-lost" if follows else name_cause(failure.cause),
        f"{sentence}{f' ({ago})' if ago else ''}; the group starts again: {state}",
        "waiting",
        (clip(failure.message),) if follows and failure.message else (),
        "see the log of that rank if it fails again"
        if not follows
        else "see the events and the nodes",
        (
            ctx.kdist("logs", *(["--rank", str(failure.rank)] if failure.rank is not None else [])),
            ctx.kdist("events"),
        ),
    )
