"""A pod of a job: its node, the state or the termination of its training container, or of the init
container before it, in kubectl's words; the download progress of init containers; and its exit
record, with the way to start the run again.

Agents write an exit record to the termination message of their container. Kubernetes truncates the
message at 4096 bytes. If the agent died before it wrote one, the message is the end of the
container's log, or empty.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from kdist.events import parse
from kdist.status import documents
from kdist.status.documents import Document
from kdist.units import count, of_total, rate
from kdist_trainer.formats import NewerFormatError, check_format, is_permanent_code
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_first_value

PULL_FAILURES: Final = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
)
"""The kubelet's reasons why a container waits for an image that it does not get."""
CONFIG_FAILURES: Final = ("CreateContainerConfigError", "CreateContainerError")
"""Its reasons why a container with an image cannot be created."""


@dataclass(frozen=True)
class NonfiniteLoss:
    """The number of reported steps with such a loss, and the last loss, as text, if it was one of
    them; empty if it was none, or is not known.
    """

    steps: int
    last: str = ""

    def __str__(self) -> str:
        times = f"NaN or infinite in {count(self.steps, 'reported step')}"
        return f"{times}, and is {self.last} at the end" if self.last else times

    def to_document(self) -> dict[str, Any]:
        """The numbers for programs."""
        return {**asdict(self), "last": self.last or None}

    @classmethod
    def read(cls, record: object) -> NonfiniteLoss | None:
        """What an exit record tells; None if no such loss was reported."""
        told = documents.at(record, "nonfinite_loss")
        steps = documents.integer(told, "steps") or 0
        return cls(steps, documents.text(told, "last")) if steps > 0 else None

    @classmethod
    def gather(cls, records: Iterable[object]) -> NonfiniteLoss | None:
        """The same of all nodes: a loss is reported by the ranks of some of them."""
        return cls.merge(map(cls.read, records))

    @classmethod
    def merge(cls, told: Iterable[NonfiniteLoss | None]) -> NonfiniteLoss | None:
        """What several nodes tell together."""
        known = [each for each in told if each is not None]
        steps = max((each.steps for each in known), default=0)
        return cls(steps, next((each.last for each in known if each.last), "")) if steps else None


DONE, STOPPED, PEERS_LOST, HANG = 0, 200, 201, 202  # of `Exit`, which is slow to import
_MAX_TEXT = 1 << 16
_MAX_NAME = 64


def describe_saved(steps: Iterable[int | None]) -> str:
    """What a run that was asked to stop has saved, by the steps of its agents' records: each is of
    the newest checkpoint then, or None if the agent did not know one.
    """
    known = [step for step in steps if step is not None]
    if not known:
        return "whether it has saved anything is not known"
    return f"step {max(known):,} is saved"


@dataclass(frozen=True)
class ExitRecord:
    """How an agent's work ended.

    Attributes:
        code: exit code of the trainer.
        cause: a word for the cause of a failure.
        outcome: `done`, `stopped` or `failed`.
        rank: the rank that failed first.
        step: its last step.
        time: unix seconds.
        collective: the collective that the rank was in.
        collectives: the last collective of each rank, one line each.
        signature: the name of the trainer's row for such failures; empty if it has none.
        advice: what to do next, in a sentence; empty if that row says nothing.
        rerun: how the run may be started again: `again`, `fixed` or `blocking`; empty if not told.
        place: the innermost line of the user's own code, in a traceback's form.
        nonfinite_loss: how often the loss of a script was NaN or infinite; None if it never was.
        separate_ranks: the number of a script's ranks if none has formed a process group with
            others, else 0.
        whole: false if the record was truncated, or is from a log.
    """

    code: int
    cause: str = ""
    outcome: str = ""
    message: str = ""
    rank: int | None = None
    node: str = ""
    step: int | None = None
    generation: int | None = None
    time: float | None = None
    traceback: tuple[str, ...] = ()
    collective: str = ""
    collectives: tuple[str, ...] = ()
    signature: str = ""
    advice: str = ""
    rerun: str = ""
    place: str = ""
    nonfinite_loss: NonfiniteLoss | None = None
    separate_ranks: int = 0
    whole: bool = True

    @property
    def permanent(self) -> bool:
        """Whether a restart cannot help."""
        return is_permanent_code(self.code)

    def to_document(self) -> dict[str, Any]:
        """Return the record as plain values."""
        fields = asdict(self)
        del fields["nonfinite_loss"]
        loss = self.nonfinite_loss
        return {
            **fields,
            **({"nonfinite_loss": loss.to_document()} if loss is not None else {}),
            "traceback": list(self.traceback),
            "collectives": list(self.collectives),
        }

    def to_text(self) -> str:
        return encode_json(self.to_document(), ensure_ascii=False)

    @classmethod
    def parse(cls, text: object) -> ExitRecord | None:
        """Parse a termination message, an annotation, or the end of a log."""
        if not isinstance(text, str):
            return None
        text = text[:_MAX_TEXT]
        document = documents.parse(text, allow_nan=True)
        return cls.read(document) or _from_log(text) or _from_truncated(text)

    @classmethod
    def read(cls, document: object, *, whole: bool = True) -> ExitRecord | None:
        """Read a record from a JSON object; None if it is not one."""
        code = documents.integer(document, "code")
        if (
            code is None
            or not 0 <= code <= 255
            or not (documents.at(document, "cause") or documents.at(document, "outcome"))
        ):
            return None
        ended = "done" if code == DONE else "stopped" if code == STOPPED else "failed"
        try:
            check_format("exit.json", document)
        except NewerFormatError as error:
            return cls(code, outcome=ended, message=str(error), whole=False)
        found = documents.read_fields(
            cls,
            document,
            outcome=documents.text(document, "outcome") or ended,
            traceback=tuple(documents.texts(document, "traceback")),
            collectives=tuple(documents.texts(document, "collectives")),
            signature=documents.text(document, "signature")[:_MAX_NAME],
            rerun=documents.text(document, "rerun")[:_MAX_NAME],
            nonfinite_loss=NonfiniteLoss.read(document),
            whole=whole and documents.at(document, "whole") is not False,
        )
        return cls(**found)


def _from_log(text: str) -> ExitRecord | None:
    for line in reversed(text.split("\n")):
        event = parse(line)
        if event is not None and event["event"] == "failed":
            return ExitRecord.read(
                {**event, "time": documents.moment(event, "time"), "outcome": "failed"},
                whole=False,
            )
    return None


def _from_truncated(text: str) -> ExitRecord | None:
    """Read the fields that are left of a truncated record."""
    if not text.lstrip().startswith("{"):
        return None
    found = {}
    for key in (each.name for each in fields(ExitRecord)):
        match = re.search(rf'[{{,]\s*"{key}"\s*:\s*', text)
        if match is None:
            continue
        try:
            found[key] = parse_first_value(text[match.end() :])
        except MalformedTextError:
            # Truncated: keep the beginning of a text.
            if text[match.end() : match.end() + 1] == '"':
                found[key] = text[match.end() + 1 :].replace("\\n", "\n").rstrip("\\")
    return ExitRecord.read(found, whole=False)


FETCHER: Final = "fetch-"
"""Beginning of the names of init containers that fetch; then follows that of the volume."""
FETCHED: Final = {
    "data": ("spec.data[{}]", "data"),
    "init": ("spec.train.init", "weights"),
    "code": ("spec.code", "code"),
    "packages": ("spec.install", "packages"),
}
"""By the volume's name without its number: the section of the job with its `size`, and a word."""
PACKAGES: Final = f"{FETCHER}packages"
"""The init container that installs packages, the first one."""


@dataclass(frozen=True)
class ContainerTermination:
    """How a container ended. `reason` is Kubernetes' word (Error, OOMKilled, Completed); `at` is in
    unix seconds.
    """

    code: int
    reason: str = ""
    message: str = ""
    at: float | None = None
    record: ExitRecord | None = None


@dataclass(frozen=True)
class FetchProgress:
    """How far a fetch is: bytes, of which `total` may be unknown, and bytes per second."""

    done: int
    total: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        amount = of_total(self.done, self.total)
        return amount if not self.rate else f"{amount}, {rate(self.rate)}"

    @classmethod
    def read(cls, event: object) -> FetchProgress | None:
        """The progress that an event of the fetching program reports; None if it is another one."""
        kind = documents.text(event, "event")
        if kind == "data-fetch":
            done = documents.integer(event, "cached_bytes") or 0
            return cls(done, documents.integer(event, "bytes"))
        done_bytes = documents.integer(event, "done_bytes")
        if kind != "data-progress" or done_bytes is None:
            return None
        total = documents.integer(event, "total_bytes")
        return cls(done_bytes, total, documents.number(event, "bytes_per_second"))


@dataclass(frozen=True)
class InitContainer:
    """The init container that a pod is at: the first that has not succeeded.

    Attributes:
        name: its name.
        url: what it fetches; empty if it fetches nothing.
        field: the field of job.yaml that names the URL.
        number: how many init containers have succeeded.
        count: how many init containers the pod has.
        running: whether it runs.
        started: unix seconds at which it started.
        reason: Kubernetes' word for why it waits.
        message: a sentence about that.
        restarts: how often it was started again.
        ended: how it ended; None while it runs.
        before: how its previous instance ended.
        progress: how far it is; None if that is unknown.
    """

    name: str
    number: int
    count: int
    url: str = ""
    field: str = ""
    running: bool = False
    started: float | None = None
    reason: str = ""
    message: str = ""
    restarts: int = 0
    ended: ContainerTermination | None = None
    before: ContainerTermination | None = None
    progress: FetchProgress | None = None

    @property
    def fetches(self) -> bool:
        """Whether it fetches something by URL, or installs packages."""
        return self.name.startswith(FETCHER)

    @property
    def subject(self) -> str:
        """What it fetches, in words."""
        _, word = FETCHED.get(self.name.removeprefix(FETCHER).partition("-")[0], FETCHED["data"])
        return word if self.name == PACKAGES else f"{word} from {self.url or self.field}"

    @property
    def failed_permanently(self) -> bool:
        """Whether what it should fetch cannot be fetched, however often it is tried."""
        failure = self.failure
        return self.fetches and failure is not None and is_permanent(failure)

    @property
    def failure(self) -> ContainerTermination | None:
        """How its newest instance that has ended failed; None if none did."""
        return next((end for end in (self.ended, self.before) if end and end.code), None)

    @property
    def state(self) -> str:
        """The status that kubectl shows: `Init:0/2`, `Init:Error`, `Init:CrashLoopBackOff`."""
        if self.ended is not None and self.ended.code:
            return f"Init:{self.ended.reason or f'ExitCode:{self.ended.code}'}"
        if self.reason and self.reason != "PodInitializing":
            return f"Init:{self.reason}"
        return f"Init:{self.number}/{self.count}"


def is_permanent(end: ContainerTermination) -> bool:
    """Whether a fetch that ended so would end so again."""
    return end.record.permanent if end.record is not None else is_permanent_code(end.code)


def read_init_container(document: Document) -> InitContainer | None:
    """The init container that a pod is at; None if it has none, or all have succeeded."""
    statuses = list(documents.items(document, "status", "initContainerStatuses"))
    specs = {
        documents.text(each, "name"): each
        for each in documents.items(document, "spec", "initContainers")
    }
    for number, status in enumerate(statuses):
        ended = read_termination(documents.at(status, "state", "terminated"))
        name = documents.text(status, "name")
        started = documents.at(status, "started") is True
        is_sidecar = documents.text(specs.get(name), "restartPolicy") == "Always"
        if (ended is not None and ended.code == 0) or (is_sidecar and started):
            continue
        waiting = documents.mapping(status, "state", "waiting")
        return InitContainer(
            name=name,
            number=number,
            count=len(statuses),
            url=_argument(specs.get(name), "--url="),
            field=_argument(specs.get(name), "--field="),
            running=bool(documents.mapping(status, "state", "running")),
            started=documents.moment(status, "state", "running", "startedAt"),
            reason=documents.text(waiting, "reason"),
            message=documents.text(waiting, "message"),
            restarts=documents.integer(status, "restartCount") or 0,
            ended=ended,
            before=read_termination(documents.at(status, "lastState", "terminated")),
        )
    return None


def _argument(spec: Document | None, option: str) -> str:
    """The value of an option among a container's arguments; empty without it."""
    found = documents.at(spec, "args")
    arguments = found if isinstance(found, list) else []
    values = (one for one in arguments if isinstance(one, str) and one.startswith(option))
    return next(values, option).removeprefix(option).replace("$$", "$")


def read_termination(terminated: object) -> ContainerTermination | None:
    """How a container ended, of its state `terminated`; None if it has not."""
    code = documents.integer(terminated, "exitCode")
    if code is None:
        return None
    message = documents.text(terminated, "message")
    return ContainerTermination(
        code=code,
        reason=documents.text(terminated, "reason"),
        message=message,
        at=documents.moment(terminated, "finishedAt"),
        record=ExitRecord.parse(message),
    )


# Names of the training container in the different kinds of workloads.
_CONTAINERS = ("trainer", "pytorch", "node")
_INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    "training.kubeflow.org/replica-index",
)
_STARTING_REASONS = ("", "ContainerCreating", "PodInitializing")
_POD_REASONS = ("Evicted", "NodeLost", "Shutdown", "Terminated", "Preempting")  # of the whole pod
_INDEX_IN_NAME = re.compile(r"-(\d+)(-[a-z0-9]{5})?$")


@dataclass(frozen=True)
class Pod:
    """One pod.

    Attributes:
        container: name of the training container.
        index: its index among the job's pods; None if unknown.
        state: the status that kubectl shows.
        reason: why the pod does not run; empty if it does.
        lost: whether the pod's node does not respond, so that its last known state may be stale.
        restarts: restarts of the container.
        created: unix seconds.
        started: unix seconds at which the container started.
        ended: how the container ended; None while it runs.
        before: how the previous container instance ended.
        init: the init container that it is at; None once the training container may start.
    """

    name: str
    container: str
    index: int | None
    node: str
    phase: str
    state: str
    reason: str = ""
    message: str = ""
    ready: bool = False
    running: bool = False
    scheduled: bool = False
    deleting: bool = False
    lost: bool = False
    restarts: int = 0
    created: float | None = None
    started: float | None = None
    ended: ContainerTermination | None = None
    before: ContainerTermination | None = None
    init: InitContainer | None = None

    @property
    def working(self) -> bool:
        return self.running and not self.lost

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def has_run(self) -> bool:
        return self.running or self.ended is not None or self.before is not None

    @property
    def troubled(self) -> bool:
        """Whether an error keeps it from running."""
        return self.reason not in _STARTING_REASONS

    @property
    def record(self) -> ExitRecord | None:
        """Its newest exit record; None without one."""
        ends = [self.ended, self.before]
        if self.init is not None:
            ends += [self.init.ended, self.init.before]
        return next((end.record for end in ends if end and end.record), None)

    @property
    def fetching(self) -> bool:
        """Whether an init container fetches data or weights for it now."""
        return self.init is not None and self.init.fetches and self.init.running


def find_successor(pod: Pod, pods: Iterable[Pod]) -> Pod | None:
    """The newest pod that has taken the place of `pod`; None if it is the newest of its index."""
    if pod.index is None:
        return None
    later = [
        each
        for each in pods
        if each.index == pod.index
        and each.name != pod.name
        and (each.created or 0.0) > (pod.created or 0.0)
    ]
    return max(later, key=lambda each: each.created or 0.0, default=None)


def read_index(name: str) -> int | None:
    """The index that the name of a pod ends with; None if it has none."""
    found = _INDEX_IN_NAME.search(name)
    return int(found[1][:9]) if found else None


def read_pod(document: Document, *, lost_nodes: Collection[str] = (), answers: bool = False) -> Pod:
    """Read a pod from its object. One whose agent answers is never lost: after an outage of its
    own, the control plane considers all nodes lost for a while.
    """
    container = container_of(document)
    status = next(
        (
            each
            for each in documents.items(document, "status", "containerStatuses")
            if each.get("name") == container
        ),
        {},
    )
    node = documents.text(document, "spec", "nodeName")
    phase = documents.text(document, "status", "phase")
    running = phase == "Running" and bool(documents.mapping(status, "state", "running"))
    deleting = bool(documents.text(document, "metadata", "deletionTimestamp"))
    silent = not answers and (node in lost_nodes or _is_abandoned(document))
    lost = phase not in ("Succeeded", "Failed") and bool(node) and silent
    ended = read_termination(documents.at(status, "state", "terminated"))
    before = phase in ("Pending", "Failed") and ended is None
    init = read_init_container(document) if before else None
    reason, message = _read_trouble(document, status)
    return Pod(
        name=documents.name(document),
        container=container,
        index=_read_index(document),
        node=node,
        phase=phase,
        state=_name_state(phase, reason, ended, init, deleting=deleting, lost=lost),
        reason=reason,
        message=message,
        ready=running and not lost and documents.at(status, "ready") is True,
        running=running,
        scheduled=bool(node),
        deleting=deleting,
        lost=lost,
        restarts=documents.integer(status, "restartCount") or 0,
        created=documents.moment(document, "metadata", "creationTimestamp"),
        started=documents.moment(status, "state", "running", "startedAt"),
        ended=ended,
        before=read_termination(documents.at(status, "lastState", "terminated")),
        init=init,
    )


def container_of(document: Document) -> str:
    """Return the name of the training container, which differs between kinds of workloads."""
    names = [
        documents.text(each, "name") for each in documents.items(document, "spec", "containers")
    ]
    return next(
        (name for name in _CONTAINERS if name in names), names[0] if names else _CONTAINERS[0]
    )


def _read_index(document: Document) -> int | None:
    for key in _INDEX_LABELS:
        if (found := documents.label(document, key)).isdecimal():
            return int(found[:9])
    return read_index(documents.name(document))


def _is_abandoned(document: Document) -> bool:
    """Whether the pod alone is unready, as the control plane marks it when its node stops
    responding.
    """
    if documents.text(document, "status", "reason") == "NodeLost":
        return True
    if documents.items(document, "spec", "readinessGates"):
        return False
    pod_ready = documents.text(documents.condition(document, "Ready"), "status")
    containers_ready = documents.text(documents.condition(document, "ContainersReady"), "status")
    return pod_ready == "False" and containers_ready == "True"


def _read_trouble(document: Document, status: Document) -> tuple[str, str]:
    """Why the pod does not run, as (reason, message)."""
    for each in (status, *documents.items(document, "status", "initContainerStatuses")):
        waiting = documents.mapping(each, "state", "waiting")
        if documents.text(waiting, "reason") not in _STARTING_REASONS:
            return documents.text(waiting, "reason"), documents.text(waiting, "message")
    scheduled = documents.condition(document, "PodScheduled")
    if documents.text(scheduled, "status") == "False":
        return documents.text(scheduled, "reason"), documents.text(scheduled, "message")
    disrupted = documents.condition(document, "DisruptionTarget")
    if documents.text(disrupted, "status") == "True":
        return documents.text(disrupted, "reason"), documents.text(disrupted, "message")
    if reason := documents.text(document, "status", "reason"):
        return reason, documents.text(document, "status", "message")
    return documents.text(status, "state", "waiting", "reason"), documents.text(
        status, "state", "waiting", "message"
    )


def _name_state(
    phase: str,
    reason: str,
    ended: ContainerTermination | None,
    init: InitContainer | None,
    *,
    deleting: bool,
    lost: bool,
) -> str:
    if lost:
        return "NodeLost"
    if phase == "Succeeded":
        return "Completed"
    if init is not None and not deleting and reason not in _POD_REASONS:
        return init.state
    if phase == "Failed":
        return (ended.reason if ended and ended.reason else reason) or "Error"
    if deleting:
        return "Terminating"
    return (ended.reason if ended and ended.reason and not reason else reason) or phase or "Unknown"


def find_permanent_failure(pods: Sequence[Pod]) -> Pod | None:
    """A pod that is started again and again although what it should fetch cannot be fetched."""
    return next(
        (pod for pod in pods if not pod.over and pod.init and pod.init.failed_permanently), None
    )


def explain_permanent_failure(pod: Pod) -> tuple[str, str]:
    """The cause of such a pod's failure, and a sentence about it."""
    record = pod.record
    words = f"it cannot fetch {pod.init.subject}" if pod.init else ""
    cause, message = (record.cause, record.message) if record else ("", "")
    return cause or "data", message or words


def describe_fetching(pods: Sequence[Pod]) -> str:
    """What pods fetch now, in a sentence that changes only when that does; empty if none does."""
    fetching = [pod.init for pod in pods if pod.init is not None and pod.fetching]
    if not fetching:
        return ""
    where = f" on {count(len(fetching), 'node')}" if len(pods) > 1 else ""
    return f"fetching {fetching[0].subject}{where}"


def find_slowest(pods: Sequence[Pod]) -> FetchProgress | None:
    """The progress of the fetching pod that has most to do; None if no progress is known."""
    known = [pod.init.progress for pod in pods if pod.fetching and pod.init and pod.init.progress]
    return max(known, key=lambda each: (each.total or 0) - each.done, default=None)


AGAIN, FIXED, BLOCKING = "again", "fixed", "blocking"
"""How the trainer's record says it: as it was, after a change, or with CUDA_LAUNCH_BLOCKING=1."""
_OF_THE_USER = ("user_code", "config", "data", "mismatch", "nan")
"""Causes that a run meets again as long as neither the job, the code nor the data has changed."""
_PLACE = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)')


def choose_rerun(record: ExitRecord) -> str:
    """`again`, `fixed` or `blocking`. Records of trainers that do not tell, and of what fetches,
    go by the cause.
    """
    return record.rerun or (FIXED if record.cause in _OF_THE_USER else AGAIN)


def describe_change(record: ExitRecord, *, installs: bool, told: str) -> str:
    """What to do before a run is started again. It may go on in the Python that lacked a package
    (`installs`); `told` names what says what to do where neither a line nor a package is known.
    """
    if record.signature == "missing-package" and installs:
        return record.advice.rpartition(": ")[2]
    if record.signature == "missing-package":
        return "build an image that has the package"
    if found := _PLACE.match(record.place):
        return f"fix {found['file']}:{found['line']}"
    return f"do what the {told} says"
