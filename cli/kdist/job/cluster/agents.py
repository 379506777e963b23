"""Polls the agents of a job in the cluster for their `/status` and metrics.

All agents are polled at the same time, each with a short timeout: through the API server's proxy,
or over a forwarded port where the proxy is forbidden or cannot reach the pods. `Agents` is for
views and waits, which poll repeatedly and need only `/status`; `fetch_samples` also fetches
metrics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from kdist import rbac
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.rbac import Right
from kdist.status import Pod
from kdist.units import count
from kdist_trainer.formats import ranges

if TYPE_CHECKING:
    from kdist.agents.client import AgentClient
    from kdist.agents.metrics import AgentSample
    from kdist.cluster import Cluster
    from kdist.job.cluster.applied import AppliedJob

RIGHTS: Final = (rbac.on_pods("get", part="proxy"), rbac.FORWARD)
"""Sets of rights of which one is needed to reach an agent: for the proxy, for a forwarded port."""
TIMEOUT: Final = 3.0
"""Seconds for one response."""
_LOST_TIMEOUT = 1.0  # seconds for a response of a pod whose node is not ready
_TOTAL_TIMEOUT = 20.0  # seconds for all agents; those whose turn has not come are skipped
_MAX_TUNNELS = 4  # agents that one poll tries over a forwarded port, which costs more
_SAMPLE_THREADS = 16
_ATTEMPT_SECONDS = 2.0  # between two attempts to find a pod
_STATUS_THREADS = 32


def fetch_samples(
    target: AppliedJob,
    pods: Sequence[Pod],
    *,
    metrics: bool = False,
    timeout: float | None = None,
) -> dict[str, AgentSample]:
    """Poll the agents of the running pods once, with `metrics` for `/metrics` too. Each has
    `timeout` seconds to answer, by default those of `AgentClient`. Returns the sample of each agent
    that answered, by its pod.
    """
    running = [pod.name for pod in pods if pod.running]
    if not running:
        return {}
    from kdist.agents.client import TIMEOUT, AgentClient, ProxyTransport, TunnelTransport

    seconds = TIMEOUT if timeout is None else timeout

    def fetch(pod: str) -> AgentSample | None:
        transports = ProxyTransport(target.cluster, pod), TunnelTransport(target.cluster, pod)
        return AgentClient(*transports, timeout=seconds).sample(metrics=metrics)

    with ThreadPoolExecutor(min(_SAMPLE_THREADS, len(running))) as pool:
        samples = list(pool.map(fetch, running))
    return {pod: sample for pod, sample in zip(running, samples, strict=True) if sample is not None}


def explain_silence(target: AppliedJob) -> KdistError:
    """The error that says why no agent answers. Raises `KdistError` if the user has no right to
    reach an agent (FORBIDDEN).
    """
    running = sum(pod.running for pod in target.pods())
    if running:
        rbac.require_one_of(target.cluster, *RIGHTS)
    return KdistError(
        f"no agent of {target.name} answers",
        hint=_describe_lack(target.cluster, running, _find_missing(target.cluster))
        if running
        else "",
        next_command=target.command("status"),
    )


def _find_missing(cluster: Cluster) -> list[Right]:
    return rbac.find_missing(cluster, [right for way in RIGHTS for right in way])


def _describe_lack(cluster: Cluster, silent: int, missing: Sequence[Right]) -> str:
    """A sentence about the rights in `missing`, which would reach the agents that do not answer
    (`silent` of them), and the role that has them; empty if the user has them all.
    """
    if not missing or not silent:
        return ""
    names = [str(right) for right in missing]
    proxied = any(right.subresource == "proxy" for right in missing)
    how = "" if proxied else " through the API server's proxy, which a NetworkPolicy may keep out"
    return (
        f"live numbers of {count(silent, 'pod')} are missing: no answer{how}, and you may not "
        f"{', '.join(names)}; {rbac.advise(names, cluster.namespace)}"
    )


def choose_pod(target: AppliedJob, *, rank: int | None = None, pod: str = "") -> Pod:
    """Select a running pod of the job: the one of the name `pod`, or the one that runs `rank`; rank
    0 if neither is given.

    Raises:
        UsageError: both `rank` and `pod` are given.
        NotFoundError: there is no such pod; the message lists those that exist.
    """
    pods = target.pods()
    running = [one for one in pods if one.running]
    if pod and rank is not None:
        raise UsageError("--rank and --pod are mutually exclusive")
    if pod:
        found = next((one for one in running if one.name == pod), None)
        if found is None:
            raise _no_pod(target, f"no pod {pod} of {target.name} runs", pods)
        return found
    if not running:
        raise _no_pod(target, f"no pod of {target.name} runs", pods)
    samples = fetch_samples(target, running, timeout=TIMEOUT)
    holder = next((name for name, sample in samples.items() if (rank or 0) in sample.ranks), None)
    if holder is None and rank is None:
        return running[0]
    if holder is None:
        known = sorted({each for sample in samples.values() for each in sample.ranks})
        shown = f"its ranks: {ranges(known)}" if known else "no agent reports its ranks yet"
        raise NotFoundError(
            f"no pod of {target.name} has rank {rank}; {shown}",
            next_command=target.command("status"),
        )
    return next(one for one in running if one.name == holder)


def wait_for_pod(target: AppliedJob, *, rank: int | None = None, pod: str = "") -> Pod:
    """Wait until there is a pod that `choose_pod` selects, however long that takes. Raises
    `KdistError` if the job has finished or is suspended.
    """
    while True:
        state = target.state()
        if state.finished or state.suspended:
            reason = f"has {state.finished}" if state.finished else "is suspended"
            raise KdistError(
                f"job {target.name} {reason}: there is no pod to forward to",
                next_command=target.command("status"),
            )
        try:
            return choose_pod(target, rank=rank, pod=pod)
        except KdistError:
            time.sleep(_ATTEMPT_SECONDS)


def _no_pod(target: AppliedJob, what: str, pods: Sequence[Pod]) -> NotFoundError:
    known = ", ".join(f"{one.name} ({one.state})" for one in pods[:8]) or "none"
    return NotFoundError(f"{what}; its pods: {known}", next_command=target.command("why"))


class Agents:
    """Polls the agents of one job repeatedly, and remembers which of them the proxy does not reach.

    Args:
        cluster: the cluster.
        namespace: the job's namespace.
        max_tunnels: number of silent agents that one poll tries over a forwarded port.

    Attributes:
        skipped: number of agents that the last poll skipped for lack of time.
        answered: number of agents that answered the last poll.
        unanswered: number of agents that did not answer the last poll.
    """

    def __init__(
        self, cluster: Cluster, *, namespace: str, max_tunnels: int = _MAX_TUNNELS
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._max_tunnels = max_tunnels
        self._tunnels: dict[str, AgentClient] = {}
        self.skipped = 0
        self.answered = 0
        self.unanswered = 0
        self._missing: list[Right] | None = None

    def poll(self, pods: Sequence[Pod]) -> dict[str, dict[str, Any]]:
        """The status of each agent that answers, by its pod. Pods on a node that is not ready are
        polled too, with a shorter timeout.
        """
        running = [pod.name for pod in pods if pod.running]
        lost = {pod.name for pod in pods if pod.lost}
        self.skipped = self.answered = self.unanswered = 0
        if not running:
            return {}
        end = time.monotonic() + _TOTAL_TIMEOUT
        answers: dict[str, dict[str, Any]] = {}
        silent: set[str] = set()

        def fetch(pod: str) -> bool:
            """Whether there was time for it."""
            if time.monotonic() >= end:
                return False
            status = self._client(pod, _LOST_TIMEOUT if pod in lost else TIMEOUT).status()
            if status is not None:
                answers[pod] = status
            elif pod not in lost and pod not in self._tunnels:
                silent.add(pod)
            return True

        with ThreadPoolExecutor(min(_STATUS_THREADS, len(running))) as pool:
            self.skipped = list(pool.map(fetch, running)).count(False)
            chosen = [pod for pod in running if pod in silent][: self._max_tunnels]
            clients = [self._tunnel(pod) for pod in chosen]
            for pod, client, status in zip(
                chosen, clients, pool.map(lambda client: client.status(), clients), strict=True
            ):
                if status is not None:
                    self._tunnels[pod] = client
                    answers[pod] = status
        self.answered = len(answers)
        self.unanswered = len(silent - answers.keys())
        return {pod: answers[pod] for pod in running if pod in answers}

    def lack(self) -> str:
        """A sentence about the rights that would reach those that did not answer the last poll;
        empty if the user has them all.
        """
        if self._missing is None and self.unanswered:
            self._missing = _find_missing(self._cluster)
        return _describe_lack(self._cluster, self.unanswered, self._missing or [])

    def _client(self, pod: str, timeout: float) -> AgentClient:
        if pod in self._tunnels:
            return self._tunnels[pod]
        from kdist.agents.client import AgentClient, ProxyTransport

        transport = ProxyTransport(self._cluster, pod, self._namespace)
        return AgentClient(transport, timeout=timeout)

    def _tunnel(self, pod: str) -> AgentClient:
        from kdist.agents.client import AgentClient, TunnelTransport

        transport = TunnelTransport(self._cluster, pod, self._namespace)
        return AgentClient(transport, timeout=TIMEOUT)
