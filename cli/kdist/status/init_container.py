"""The init containers of a pod: which of them keeps the pod from starting, and how far those are
that fetch data or weights by URL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kdist.status import documents
from kdist.status.documents import Document
from kdist.status.exit_record import ExitRecord
from kdist.units import of_total, rate

FETCHER: Final = "fetch-"
"""Beginning of the names of init containers that fetch; then follows that of the volume."""
WEIGHTS: Final = f"{FETCHER}init"
"""The init container that fetches weights."""


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
        """Whether it fetches data or weights by URL."""
        return self.name.startswith(FETCHER)

    @property
    def what(self) -> str:
        """What it fetches, in words."""
        return f"{'weights' if self.name == WEIGHTS else 'data'} from {self.url or self.field}"

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
    return end.record.permanent if end.record is not None else 0 < end.code < 128


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
