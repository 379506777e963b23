"""The input of a rule, `DiagnosticContext`, and its result, `Diagnosis`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from kdist.spec.training_job import Spec
from kdist.status import (
    AGAIN,
    BLOCKING,
    FIXED,
    ExitRecord,
    JobStatus,
    Pod,
    Snapshot,
    choose_rerun,
    describe_change,
    documents,
    find_successor,
    read_start,
)
from kdist.status.documents import Document
from kdist.status.job_status import explains_start
from kdist.units import seconds

Severity = Literal["fine", "waiting", "blocked", "failed"]
Cause = Literal[
    "queued", "queue-too-small", "queue-unusable", "quota", "limit-range", "pod-security",
    "webhook-refused", "webhook-away", "policy-refused", "no-service-account", "no-priority-class",
    "pods-refused", "operator-absent", "no-workload", "controller-absent", "not-accepted",
    "outdated", "unschedulable", "claim-missing", "claim-pending", "claim-lost", "nodes-avoided",
    "avoids", "mount", "secret-missing", "configmap-missing", "container", "container-start",
    "slow-pull", "image", "image-auth", "image-disk", "image-limit", "image-missing", "image-name",
    "image-platform", "image-registry", "image-tls", "image-user", "fetch", "fetching",
    "out-of-memory", "crash", "evicted", "pod-refused", "failed", "user-code", "config",
    "preflight", "data", "mismatch", "nan", "oom-device", "oom-host", "budget", "deadline",
    "storage", "collective-timeout", "collective-mismatch", "peers-lost", "signal", "preempted",
    "device", "node", "network", "loader", "early-exit", "retry", "unknown", "account-gone",
    "configmap-gone", "exchange-key-missing", "connections-refused", "start-requested",
    "machine-faults", "slow-start", "pod-lost", "node-lost", "rendezvous", "hang", "no-answer",
    "warning", "not-known", "nodes-missing", "separate-ranks", "starting", "suspended", "stopped",
    "done", "none", "not-saved", "killed", "interrupted", "never-started", "only-checkpoints",
]  # fmt: skip
"""The stable names: those that `docs/how-to/running-jobs.md` lists."""
_BY_NAME: dict[str, Cause] = {each: each for each in get_args(Cause)}

_LONGEST = 600  # characters of a message that is quoted
_FIRST = "do what the fix says"
_NAMED = 3  # pods that are named one by one
_OPENED_NONE = "no rank has opened a Checkpointer"  # the trainer's words
_LAGS = 10  # times that a webhook may refuse what it has not heard of
_MADE_AGAIN = 120.0  # seconds from the end of the old pods until the first new one, at most
_UNHEARD = re.compile(r'denied the request: \w+\.[\w.-]+ "[^"]+" not found')
_FORMS = 15.0
"""Seconds within which no new group has formed: a failure then is noticed late."""
_RETRIES = 5  # times, some 15 s, that a kubelet may miss what it needs for a new pod
_UNSYNCED = re.compile(r"failed to sync \w+ cache: timed out|no relationship found between node")


@dataclass(frozen=True)
class Diagnosis:
    """One cause: its stable name, a sentence that explains it, the evidence, a fix, and the
    commands to run next, as a shell takes them.

    `severity`: `fine` needs nothing, `waiting` may resolve by itself, `blocked` needs an action,
    `failed` is final. `change`: what to do before the last command, which would fail without it.
    """

    cause: Cause
    sentence: str
    severity: Severity = "blocked"
    evidence: tuple[str, ...] = ()
    fix: str = ""
    commands: tuple[str, ...] = ()
    change: str = ""
    also: tuple[Diagnosis, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"<Diagnosis {self.cause}: {self.sentence}.{fix}>"

    def to_document(self) -> dict[str, Any]:
        found = {**asdict(self), "evidence": list(self.evidence), "commands": list(self.commands)}
        return {**found, "also": [each.to_document() for each in self.also]}


def name_cause(known: str) -> Cause:
    """The name for `user_code` or `NotSaved`; `unknown` for what only a newer kdist knows."""
    words = re.sub("_|(?<=[a-z])(?=[A-Z])", "-", known)
    return _BY_NAME.get(words.lower(), "unknown")


Rule = Callable[["DiagnosticContext"], Diagnosis | None]


class KubernetesEvent(NamedTuple):
    """A Kubernetes event. `at` is the unix time of its latest occurrence, `times` their number,
    `warns` whether it is of type Warning.
    """

    kind: str
    name: str
    reason: str
    message: str
    at: float
    times: int
    warns: bool = False

    @property
    def lags(self) -> bool:
        """Whether it says only that a webhook, or the kubelet, has not heard yet of the object that
        was just made: who asked tries again.
        """
        unheard = self.times <= _LAGS and _UNHEARD.search(self.message) is not None
        return unheard or (self.times <= _RETRIES and _UNSYNCED.search(self.message) is not None)

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.kind.lower()}/{self.name}: {self.reason}: {clip(self.message)}{often}"


class DiagnosticContext:
    """The input of rules: a snapshot, its status, and shortcuts to common lookups."""

    def __init__(self, seen: Snapshot) -> None:
        self.seen = seen
        self.status: JobStatus = seen.status
        self.name = self.status.name
        self.namespace = self.status.namespace
        self.pods = self.status.pods
        self.now = seen.taken

    def missing(self, what: str) -> str:
        """What is said of an object that the job needs and that does not exist."""
        return f"{what} does not exist in namespace {self.namespace}"

    @cached_property
    def events(self) -> list[KubernetesEvent]:
        """All events of the job, the latest first."""
        return sorted((_read_event(each) for each in self.seen.events), key=lambda event: -event.at)

    def events_of(
        self, kind: str, names: Iterable[str], *reasons: str
    ) -> Iterator[KubernetesEvent]:
        """Events about these objects with one of these reasons, the latest first."""
        wanted = set(names)
        return (
            event
            for event in self.events
            if event.kind == kind and event.name in wanted and event.reason in reasons
        )

    @cached_property
    def started(self) -> float | None:
        """When a user had the job start again (unix seconds), if that explains what it does: pods
        that were all made long after it are those of another start, and a worker group of the new
        pods may have failed since, or have saved before all its pods ended.
        """
        at = read_start(self.seen.config_map, self.seen.resource)
        if at is None or not explains_start(at, self.now):
            return None
        default = Spec.model_fields["termination_grace_period_seconds"].default
        grace = documents.integer(self.seen.job, "spec", "terminationGracePeriodSeconds") or default
        made = [pod.created for pod in self.pods if not pod.over and pod.created is not None]
        if not made:  # those before have saved within their grace period
            return None if self.had_formed(at + grace, self.status.last_checkpoint_time) else at
        first = min(made)  # before `at` it is one that still has to end
        is_past = first > at + grace + _MADE_AGAIN or (first >= at and self.has_failed_since(first))
        return None if is_past else at

    @cached_property
    def continuation(self) -> str:
        """Where a new start begins, as far as that is known: a script without a Checkpointer has
        nothing to continue from.
        """
        saved = self.status.last_checkpoint_step
        if saved:
            return f"it resumes from its last checkpoint, of step {saved:,}"
        spec, record = documents.mapping(self.seen.job, "spec"), self.status.exit_record
        if documents.at(spec, "script") is None:
            if "checkpoints" in spec and spec["checkpoints"] is None:
                return "it starts from its beginning, because it has no checkpoints"
            return "it resumes from its last checkpoint, if it has one"
        if record is not None and _OPENED_NONE in record.message:
            return "its script starts from its beginning, because it opens no Checkpointer"
        return "its script resumes if it opens a Checkpointer, else it starts from its beginning"

    @property
    def may_end(self) -> bool:
        """Whether a lost pod ends the job unless its script has opened a Checkpointer."""
        spec = documents.mapping(self.seen.job, "spec")
        script, limit = documents.at(spec, "script"), documents.at(spec, "maxRestarts")
        return script is not None and limit is None and not self.status.last_checkpoint_step

    def has_failed_since(self, at: float) -> bool:
        """Whether a worker group that has formed after `at` (unix seconds) has failed: what is so
        now follows from that, and no longer from what was before.
        """
        failure = self.status.last_failure
        return failure is not None and self.had_formed(at, failure.time)

    def has_gone_on_since(self, at: float) -> bool:
        """Whether a worker group of pods that all began after `at` (unix seconds) has failed or
        saved: with an older pod, either may be of the group before.
        """
        begun = [pod.started or self.now for pod in self.pods if not pod.over]
        if not begun or min(begun) < at:
            return False
        latest = max(begun)
        saved = self.had_formed(latest, self.status.last_checkpoint_time)
        return saved or self.has_failed_since(latest)

    @staticmethod
    def had_formed(since: float, at: float | None) -> bool:
        """Whether a worker group that has formed after `since` may have been there at `at`."""
        return (at or 0.0) > since + _FORMS

    def document(self, pod: Pod) -> Document:
        return next((each for each in self.seen.pods if documents.name(each) == pod.name), {})

    def is_replaced(self, pod: Pod) -> bool:
        """Whether another pod has taken its place since: what it says is of the past."""
        return find_successor(pod, self.pods) is not None

    @property
    def here(self) -> int:
        """How many pods exist that may train, or may start again as they are."""
        return sum(not pod.over and not pod.deleting for pod in self.pods)

    @property
    def waiting(self) -> list[Pod]:
        """Pods that do not run yet, or not yet again."""
        return [
            pod
            for pod in self.pods
            if not pod.over and not pod.running and not pod.lost and not pod.deleting
        ]

    @property
    def stuck(self) -> bool:
        return self.status.phase.waiting

    def ago(self, at: float | None) -> str:
        """Time since `at` (unix seconds) in words, e.g. `5 s ago`; empty if unknown."""
        return "" if at is None or at <= 0 else f"{seconds(max(0.0, self.now - at))} ago"

    def kdist(self, verb: str, *args: str) -> str:
        return " ".join(["kdist", verb, self.name, *self._namespace_option, *args])

    def kubectl(self, *args: str) -> str:
        return " ".join(["kubectl", *args, *self._namespace_option])

    def start_again(self, record: ExitRecord | None) -> tuple[str, str]:
        """The command that trains on after a failure, and what to change before; empty where
        nothing needs to. A failure without a record may repeat.
        """
        rerun, restart = choose_rerun(record) if record else FIXED, self.kdist("restart")
        if rerun == AGAIN:
            return restart, ""
        change = describe_change(record, installs=False, told="fix") if record else _FIRST
        if rerun == BLOCKING:
            change = "add CUDA_LAUNCH_BLOCKING=1 to spec.env"
        apply = " ".join(["kdist", "apply", "JOB.yaml", *self._namespace_option])
        return f"{apply} && {restart}", change

    @property
    def _namespace_option(self) -> list[str]:
        return ["-n", self.namespace] if self.namespace else []


def _read_event(document: Document) -> KubernetesEvent:
    times = (
        documents.moment(document, "lastTimestamp"),
        documents.moment(document, "series", "lastObservedTime"),
        documents.moment(document, "eventTime"),
        documents.moment(document, "firstTimestamp"),
        documents.moment(document, "metadata", "creationTimestamp"),
    )
    return KubernetesEvent(
        kind=documents.text(document, "involvedObject", "kind"),
        name=documents.text(document, "involvedObject", "name"),
        reason=documents.text(document, "reason"),
        message=documents.text(document, "message").strip(),
        at=next((each for each in times if each is not None), 0.0),
        times=documents.integer(document, "count")
        or documents.integer(document, "series", "count")
        or 1,
        warns=documents.text(document, "type") == "Warning",
    )


def clip(text: str, longest: int = _LONGEST) -> str:
    """Text on one line, truncated to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def name_pods(pods: Sequence[Pod]) -> str:
    """`digits-1`, `digits-1 and digits-2`, `digits-1, digits-2, digits-3 and 5 more`."""
    return name_all([pod.name for pod in pods])


def name_all(names: Sequence[str]) -> str:
    """Names in a sentence: at most three, and how many more."""
    shown, more = list(names[:_NAMED]), len(names) - _NAMED
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
