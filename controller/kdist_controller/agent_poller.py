"""Polls the agents of running jobs: one agent of each job every half minute, more often only for a
short time after its pods have changed. Also diagnoses jobs that make no progress.

Pods run images of their users, who may have them answer slowly or never: a job's turn has an end,
a namespace gets a share of the threads, and little is kept of an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from kdist.agents.client import AgentClient, AgentTransport
from kdist.cluster import Cluster
from kdist.diagnose import Diagnosis, diagnose
from kdist.errors import KdistError
from kdist.job.cluster import Agents, fetch_snapshot
from kdist.status import AgentStatus, Pod, documents
from kdist.status.documents import Document
from kdist_controller.metrics import Metrics
from kdist_controller.observation import Observed
from kdist_controller.resource import JobKey, note_start
from kdist_controller.work_queue import WorkQueue

_log = logging.getLogger(__name__)

Route = Callable[[str, Document], AgentTransport]
"""The way to an agent, by the namespace and the object of its pod."""

INTERVAL_SECONDS: Final = 30.0
STUCK_SECONDS: Final = 300.0
"""The longest pause between two diagnoses of a job that does not progress."""
REFUSED_SECONDS: Final = 5.0
"""The longest pause while the API server refuses an agent the rendezvous: what it lacks may be
there again, made by this controller.
"""
_REFUSED_TURNS: Final = 24
"""How often such agents are asked so soon: what is not there again by then may never be."""
_FIRST_SECONDS: Final = 1.0
_STALE_SECONDS: Final = 3 * INTERVAL_SECONDS
_ASKED_FOR_RANK_0: Final = 3
_THREADS: Final = 16
_SHARE: Final = 4
"""Threads that one namespace may keep busy."""
_TIMEOUT: Final = 3.0
_TURN_SECONDS: Final = 9.0
"""After which a job's turn ends with those that have been asked."""
_AT_ONCE: Final = 16


@dataclass
class Inquiry:
    """What is known of one job's agents."""

    pods: Sequence[Document] = ()
    resource: Document = field(default_factory=dict)
    shape: tuple[object, ...] = ()
    everyone: bool = False
    stuck: bool = False
    refusals: int = 0
    """The latest turns in a row in which the API server refused an agent the rendezvous."""
    pause: float = _FIRST_SECONDS
    answers: dict[str, tuple[float, Document]] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)
    """When each pod that did not answer was asked last."""
    diagnosis: Diagnosis | None = None
    diagnosed_at: float = 0.0
    diagnosis_pause: float = _FIRST_SECONDS

    def set_stuck(self, *, stuck: bool) -> None:
        """Record whether the job progresses. What kept it from it at an earlier time explains
        nothing now.
        """
        if stuck and not self.stuck:
            self.diagnosis, self.diagnosed_at = None, 0.0
        self.stuck = stuck

    @property
    def longest_pause(self) -> float:
        is_soon = 0 < self.refusals <= _REFUSED_TURNS
        return REFUSED_SECONDS if is_soon else INTERVAL_SECONDS

    def needs_diagnosis(self, now: float) -> bool:
        return self.stuck and now - self.diagnosed_at >= self.diagnosis_pause

    def diagnosed(self, diagnosis: Diagnosis | None, now: float) -> None:
        """Record a diagnosis; the pause until the next one doubles."""
        self.diagnosis, self.diagnosed_at = diagnosis, now
        self.diagnosis_pause = min(STUCK_SECONDS, 2 * self.diagnosis_pause)


def ask_agents(route: Route, namespace: str, pods: Sequence[Document]) -> dict[str, Document]:
    """The `/status` of every agent that answers, by the pods of a namespace."""

    def ask(pod: Document) -> Document | None:
        return AgentClient(route(namespace, pod), timeout=_TIMEOUT).status()

    if not pods:
        return {}
    with ThreadPoolExecutor(min(len(pods), _AT_ONCE)) as pool:
        answers = zip(pods, pool.map(ask, pods), strict=True)
        return {documents.name(pod): answer for pod, answer in answers if answer is not None}


class AgentPoller:
    """Polls agents on threads of its own, so that one that does not respond delays no job. `notify`
    receives each job about which something new is known.
    """

    def __init__(
        self,
        cluster: Cluster,
        route: Route,
        *,
        metrics: Metrics,
        notify: Callable[[JobKey], None],
    ) -> None:
        self._cluster = cluster
        self._route = route
        self._metrics = metrics
        self._notify = notify
        self._queue = WorkQueue(share=_SHARE)
        self._inquiries: dict[JobKey, Inquiry] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the threads, which end with the process."""
        self._queue.start(self._inquire, threads=_THREADS, name="agents")

    def answers(self, key: JobKey) -> dict[str, Document]:
        """The newest answer of each agent that has answered lately, by pod."""
        now = time.monotonic()
        with self._lock:
            found = self._inquiries.get(key) or Inquiry()
            return {
                pod: answer
                for pod, (at, answer) in found.answers.items()
                if now - at < _STALE_SECONDS
            }

    def silent(self, key: JobKey) -> set[str]:
        """The pods whose agents were asked last and did not answer."""
        with self._lock:
            found = self._inquiries.get(key)
            return set() if found is None else set(found.silent)

    def diagnosis(self, key: JobKey) -> Diagnosis | None:
        """Why the job does not progress, if that was asked lately."""
        with self._lock:
            found = self._inquiries.get(key)
            return None if found is None or not found.stuck else found.diagnosis

    def plan(self, observed: Observed, *, poll_now: bool) -> None:
        """Poll the agents of a job when it is time, or all of them at once."""
        key, status = observed.resource.key, observed.status
        working = {pod.name for pod in status.pods if pod.working}
        stuck = status.phase.waiting and observed.config_map is not None
        if (not working and not stuck) or status.phase.terminal:
            self.forget(key)
            return
        shape = (stuck, *((pod.name, pod.state, pod.ready, pod.restarts) for pod in status.pods))
        with self._lock:
            found = self._inquiries.setdefault(key, Inquiry())
            found.pods = [pod for pod in observed.pods if documents.name(pod) in working]
            found.resource = observed.resource.document
            found.answers = {pod: answer for pod, answer in found.answers.items() if pod in working}
            found.silent = {pod: at for pod, at in found.silent.items() if pod in working}
            found.set_stuck(stuck=stuck)
            fresh = shape != found.shape
            found.shape = shape
            found.everyone = found.everyone or poll_now
            if fresh or poll_now:
                found.pause = found.diagnosis_pause = _FIRST_SECONDS
                found.refusals = 0
        if fresh or poll_now:
            self._queue.add(key, after=_FIRST_SECONDS)

    def forget(self, key: JobKey) -> None:
        with self._lock:
            self._inquiries.pop(key, None)

    def _inquire(self, key: JobKey) -> float | None:
        """Ask the agents of a job once; returns the seconds until the next time."""
        with self._lock:
            found = self._inquiries.get(key)
            if found is None:
                return None
            pods = sorted(found.pods, key=partial(_order, found))
            everyone, stuck, resource = found.everyone, found.stuck, found.resource
            diagnosing = found.needs_diagnosis(time.monotonic())
            found.everyone = False
        turn = self._ask(key, pods, everyone=everyone)
        diagnosis = self._diagnose(key, turn, resource) if diagnosing else None
        now = time.monotonic()
        with self._lock:
            found = self._inquiries.get(key)
            if found is None:
                return None
            if turn.answers:  # what another says now counts more than an earlier answer
                found.answers = {
                    pod: kept for pod, kept in found.answers.items() if pod not in turn.silent
                }
            found.answers |= {
                # the list of peers, the largest part, is not read later
                pod: (now, {name: value for name, value in answer.items() if name != "peers"})
                for pod, answer in turn.answers.items()
            }
            found.silent = {
                pod: at for pod, at in found.silent.items() if pod not in turn.answers
            } | dict.fromkeys(turn.silent, now)
            found.everyone = found.everyone or turn.unfinished
            if diagnosing:
                found.diagnosed(diagnosis, now)
            told = [documents.at(each, "rendezvous_refused") for each in turn.answers.values()]
            found.refusals = found.refusals + 1 if True in told else 0
            most = STUCK_SECONDS if stuck and not pods else found.longest_pause
            found.pause = _FIRST_SECONDS if turn.unfinished else min(most, 2 * found.pause)
            pause = found.pause
        self._notify(key)
        return pause

    def _ask(self, key: JobKey, pods: Sequence[Document], *, everyone: bool) -> _Turn:
        """Ask for the agent that runs rank 0, or all, as long as a turn lasts."""
        turn = _Turn()
        end = time.monotonic() + _TURN_SECONDS
        for pod in pods:
            if not everyone and len(turn.answers) >= _ASKED_FOR_RANK_0:
                break
            if time.monotonic() >= end:
                turn.unfinished = everyone
                break
            name = documents.name(pod)
            answer = AgentClient(self._route(key.namespace, pod), timeout=_TIMEOUT).status()
            self._metrics.agent_requests.labels("answered" if answer else "silent").inc()
            if answer is None:
                turn.silent.append(name)
                continue
            turn.answers[name] = answer
            read = AgentStatus.read(name, answer)
            if read is not None and read.finished:
                everyone = True  # a job has ended when all of its agents have
            elif not everyone and _runs_rank_0(answer):
                break
        return turn

    def _diagnose(self, key: JobKey, turn: _Turn, resource: Document) -> Diagnosis | None:
        cluster = self._cluster.within(key.namespace)
        try:
            known = _KnownAgents(cluster, namespace=key.namespace, turn=turn)
            seen = fetch_snapshot(cluster, key.name, agents=known, watched=resource)
            noted = note_start(seen.config_map, documents.text(resource, "spec", "restartedAt"))
            return diagnose(replace(seen, config_map=noted))
        except KdistError as error:
            _log.warning("cannot say why %s does not progress: %s", key, error)
            return None


@dataclass
class _Turn:
    """What came of asking a job's agents once; `unfinished` if it has to go on soon."""

    answers: dict[str, Document] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    unfinished: bool = False


def _order(inquiry: Inquiry, document: Document) -> tuple[int, float]:
    """Ask rank 0 first, then who has answered, who was not asked, who was silent the longest."""
    pod = documents.name(document)
    if pod in inquiry.silent:
        return 3, inquiry.silent[pod]
    if pod not in inquiry.answers:
        return 2, 0.0
    return (0 if _runs_rank_0(inquiry.answers[pod][1]) else 1), 0.0


def _runs_rank_0(answer: Document | None) -> bool:
    return any(rank.get("rank") == 0 for rank in documents.items(answer, "ranks"))


class _KnownAgents(Agents):
    """Agents that have been asked already; those that were not are not called silent."""

    def __init__(self, cluster: Cluster, *, namespace: str, turn: _Turn) -> None:
        super().__init__(cluster, namespace=namespace)
        self._turn = turn

    def poll(self, pods: Sequence[Pod]) -> dict[str, dict[str, Any]]:
        answers = self._turn.answers
        asked = {*answers, *self._turn.silent}
        self.skipped = sum(pod.working and pod.name not in asked for pod in pods)
        return {pod.name: dict(answers[pod.name]) for pod in pods if pod.name in answers}
