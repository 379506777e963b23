"""Jobs of several kinds that train in one namespace, and what a look at one of them says: `kdist
why`, and the conditions of its TrainingJob if it has one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kdist import cluster
from kdist.cluster import Cluster
from kdist.diagnose import diagnose
from kdist.errors import Code, KdistError
from kdist.job.cluster import fetch_snapshot
from kdist.manifest import TRAINING_JOB
from kdist.status import documents
from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

PAUSE = 5.0
"""Seconds from one round of looks to the next."""
_PATIENCE = 300.0  # for all jobs to train, ten pods on two cores
_TIMEOUT = 10.0  # for an answer of an API server on a loaded machine, and for another try
_UNREACHABLE = "unreachable"
RESULTS = ("event", "consequence", "not known", "fine")


class Look(NamedTuple):
    """What was said of one job at one moment, by `why` or by its TrainingJob's `status`. The cause
    is that of `why`, or the reason of the condition `Running`.
    """

    kind: str
    source: str
    cause: str
    sentence: str


class Fleet:
    """One job of each kind, named like it. `controlled`: each is a TrainingJob of the controller's.

    Args:
        namespace: where they are.
        kinds: of workloads.
        controlled: whether the controller makes their objects.
        train: fields of their training that are not as in the others.
    """

    def __init__(
        self,
        namespace: Namespace,
        kinds: Sequence[str],
        *,
        controlled: bool,
        train: Mapping[str, Any] | None = None,
    ) -> None:
        self.namespace = namespace
        self.kinds = tuple(kinds)
        self.controlled = controlled
        self._train = train or {}
        self._cluster: Cluster = cluster.connect(
            namespace=namespace.name,
            file=namespace.environment["KUBECONFIG"],
            retry_seconds=_TIMEOUT,
            request_timeout=_TIMEOUT,
        )

    def apply(self, kind: str) -> None:
        """`kdist apply` with the job's file."""
        way = () if self.controlled else ("--direct",)
        self.namespace.kdist("apply", f"{kind}.yaml", *way)

    def pods(self, kind: str) -> list[str]:
        """The names of the job's pods that nobody is taking away."""
        return [pod["metadata"]["name"] for pod in self.namespace.pods(kind)]

    def settle(self, calm: Job) -> None:
        """Wait until every job trains; one that does not is deleted and sent again.

        Args:
            calm: makes the document of a job.
        """
        self.namespace.copy_sources()
        for kind in self.kinds:
            self.namespace.write(_describe(calm, kind, self._train), f"{kind}.yaml")
        self.each(self._start)
        waiting = [kind for kind in self.kinds if not self._train_within(kind, _PATIENCE)]
        for kind in waiting:
            self.namespace.kdist("delete", kind, "--timeout=3m")
            self._start(kind)
        never = [kind for kind in waiting if not self._train_within(kind, _PATIENCE)]
        assert never == [], f"these jobs do not train: {never}"

    def each(self, act: Callable[[str], Any]) -> None:
        """Do something to every job, to all at once."""
        with ThreadPoolExecutor(len(self.kinds)) as pool:
            for done in [pool.submit(act, kind) for kind in self.kinds]:
                done.result()

    def watch(
        self, act: Callable[[Fleet], None], *, rounds: int, most: int
    ) -> tuple[list[list[Look]], bool]:
        """Look at every job while something is done to them: for so many rounds, or with 0 until
        all of them train again, in two rounds one after the other.

        Returns the looks of each round, and whether the last ones found all jobs at work.
        """
        seen: list[list[Look]] = []
        with ThreadPoolExecutor(1) as pool:
            doing: Future[None] = pool.submit(act, self)
            over = 0
            while over < most:
                began = time.monotonic()
                seen.append(self.look())
                over += doing.done()
                settled = len(seen) > 3 and all(map(trains, seen[-1] + seen[-2]))
                if doing.done() and (len(seen) >= rounds if rounds else settled):
                    break
                time.sleep(max(0.0, began + PAUSE - time.monotonic()))  # until the next round
            doing.result()
        return seen, all(map(trains, seen[-1]))

    def look(self) -> list[Look]:
        """One look at every job, at all at once."""
        with ThreadPoolExecutor(2 * len(self.kinds)) as pool:
            told = [pool.submit(self._ask, kind) for kind in self.kinds]
            if self.controlled:
                told += [pool.submit(self._read_status, kind) for kind in self.kinds]
            return [each.result() for each in told]

    def _ask(self, kind: str) -> Look:
        try:
            found = diagnose(fetch_snapshot(self._cluster, kind, controllers=True))
        except KdistError as error:
            return _explain(kind, "why", error)
        return Look(kind, "why", found.cause, found.sentence)

    def _read_status(self, kind: str) -> Look:
        try:
            found = self._cluster.get(*TRAINING_JOB, kind)
        except KdistError as error:
            return _explain(kind, "status", error)
        runs = documents.condition(found, "Running")
        words = documents.text(found, "status", "message")
        return Look(kind, "status", documents.text(runs, "reason"), words)

    def _start(self, kind: str) -> None:
        if not trains(self._ask(kind)):
            self.apply(kind)

    def _train_within(self, kind: str, seconds: float) -> bool:
        def train() -> bool:
            told = not self.controlled or trains(self._read_status(kind))
            return told and trains(self._ask(kind))

        return self.namespace.wait_until(train, seconds)


def trains(look: Look) -> bool:
    """Whether the look found the job at work."""
    return look.sentence.startswith("nothing is wrong")


def judge(look: Look, named: str) -> str:
    """What the look is, if an event is named by sentences of this pattern."""
    if re.search(named, look.sentence):
        return "event"
    if trains(look):
        return "fine"
    return "not known" if "not known" in look.sentence else "consequence"


def tabulate(rounds: Iterable[Iterable[Look]], named: str) -> dict[str, dict[str, int]]:
    """How often the looks of each source were what."""
    found: dict[str, dict[str, int]] = {}
    for look in (each for one in rounds for each in one):
        row = found.setdefault(look.source, dict.fromkeys(RESULTS, 0))
        row[judge(look, named)] += 1
    return found


def _explain(kind: str, source: str, error: KdistError) -> Look:
    if error.code is not Code.UNREACHABLE:
        return Look(kind, source, "error", f"{type(error).__name__}: {error.message}")
    return Look(kind, source, _UNREACHABLE, error.message)


def _describe(calm: Job, kind: str, train: Mapping[str, Any]) -> dict[str, Any]:
    """A job of two nodes without end, on different ones if possible, whose image is looked up in
    its registry at each start.
    """
    own = {"labelSelector": {"matchLabels": {"kdist.dev/job": kind}}}
    term = {"weight": 100, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", **own}}
    wish = {"preferredDuringSchedulingIgnoredDuringExecution": [term]}
    document = calm(
        backend=kind,
        nodes=2,
        train={"workload": "calm:Sleepy", "steps": 1_000_000, "evaluate": "never", **train},
        resources={"cpu": 0.4, "memory": "1Gi"},
        podTemplate={"spec": {"affinity": {"podAntiAffinity": wish}}},
    )
    (container,) = document["spec"]["podTemplate"]["spec"]["containers"]
    always = {**container, "imagePullPolicy": "Always"}
    document["spec"]["podTemplate"]["spec"]["containers"] = [always]
    return {**document, "metadata": {"name": kind}}
