"""A job in a cluster, as `kdist.job.job.Job` describes it. What only looks at it starts from a
snapshot, what needs to know how it was applied from an `AppliedJob`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.deploy import describe_suspended
from kdist.errors import Code, KdistError
from kdist.job.cluster import agents, wait
from kdist.job.cluster.snapshot import fetch_snapshot, finalize, watch_job
from kdist.job.job import (
    SILENT,
    Change,
    DeleteOptions,
    Deletion,
    Dialog,
    Forward,
    LogSelection,
)
from kdist.status import JobStatus, Snapshot
from kdist.status.documents import last_seen, uid

if TYPE_CHECKING:
    from kdist.agents.metrics import AgentSample
    from kdist.cluster import Cluster
    from kdist.deploy import Plan, ResourcePlan
    from kdist.diagnose import Diagnosis
    from kdist.job.cluster.applied import AppliedJob
    from kdist.job.job import LogLine

_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class ClusterJob:
    """A job of this name in the connection's namespace; whether it exists shows when it is used."""

    cluster: Cluster
    name: str
    dialog: Dialog = SILENT

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    @property
    def no_events(self) -> str:
        return f"there are no events for {self.name}; a cluster keeps them for an hour"

    @cached_property
    def applied(self) -> AppliedJob:
        """The job as it was applied. Raises as `AppliedJob.find` does."""
        from kdist.job.cluster.applied import AppliedJob

        return AppliedJob.find(self.cluster, self.name, dialog=self.dialog)

    def snapshot(self) -> Snapshot:
        found = fetch_snapshot(self.cluster, self.name)
        finalize(self.cluster, found)
        return found

    def watch(self) -> Iterator[tuple[Snapshot, Diagnosis]]:
        from kdist.diagnose import diagnose

        return ((each, diagnose(each)) for each in watch_job(self.cluster, self.name))

    def why(self) -> tuple[Snapshot, Diagnosis]:
        from kdist.diagnose import diagnose

        seen = fetch_snapshot(self.cluster, self.name, controllers=True)
        if seen.gap:
            self.dialog.warn(f"{seen.gap}: a rank that hangs or is slow may be among them")
        return seen, diagnose(seen)

    def events(self, types: set[str], *, follow: bool) -> Iterator[Sequence[Mapping[str, Any]]]:
        shown: set[tuple[str, str]] = set()
        while True:
            events = fetch_snapshot(self.cluster, self.name).events
            chosen = [e for e in events if not types or str(e.get("type") or "").lower() in types]
            yield sorted((e for e in chosen if _identify(e) not in shown), key=last_seen)
            if not follow:
                return
            shown.update(map(_identify, chosen))
            time.sleep(_POLL_SECONDS)

    def logs(self, chosen: LogSelection) -> Iterator[LogLine | JobStatus]:
        from kdist.job.cluster import logs

        return logs.select(self, chosen)

    def wait(self, goal: str, *, timeout: float | None) -> JobStatus | None:
        notify = self.dialog.notify
        return wait.wait_for(self.cluster, self.name, goal, timeout=timeout, notify=notify)

    def await_answer(self, plan: ResourcePlan, sent: Mapping[str, Any], *, since: float) -> None:
        """Wait until the controller has done what it can do for the TrainingJob `sent`, for some
        seconds from the monotonic time `since`, and say what it leaves for later; if it does not
        act, a warning says so. Raises `KdistError` for a job that it does not accept (USAGE).
        """
        name, place = self.name, f"-n {self.namespace}"
        left = max(0.0, since + wait.ANSWER_SECONDS - time.monotonic())
        try:
            state = wait.wait_for_answer(self.cluster, sent, timeout=left, settled=True)
        except KdistError as error:
            if error.code is not Code.TIMEOUT:
                raise
            self.dialog.warn(f"{error.message}; {error.hint}")
            self.dialog.notify(f"Next: {error.next_command}")
            return
        if state.outdated:
            self.dialog.warn(f"{name}: {state.outdated}: `kdist restart {name} {place}`")
        if state.suspended and not plan.job.spec.suspend:
            self.dialog.warn(describe_suspended(name, self.namespace))

    def find_old_end(self, plan: Plan | ResourcePlan) -> str | None:
        """See `review.find_old_end`."""
        from kdist.job.cluster import review

        return review.find_old_end(self.cluster, plan)

    def samples(self) -> Mapping[str, AgentSample]:
        return agents.fetch_samples(self.applied, self.applied.pods(), metrics=True)

    def explain_silence(self) -> KdistError:
        return agents.explain_silence(self.applied)

    def suspend(self, how: Change) -> str:
        from kdist.job.cluster import suspend

        return suspend.suspend(self.applied, how)

    def resume(self, how: Change) -> str:
        from kdist.job.cluster import suspend

        return suspend.resume(self.applied, how)

    def restart(self, how: Change, *, fresh: bool, confirmed: bool) -> str:
        from kdist.job.cluster import changes

        return changes.restart(self.applied, how, fresh=fresh, confirmed=confirmed)

    def scale(self, nodes: str, how: Change) -> str:
        from kdist.job.cluster import scale

        return scale.scale(self.applied, nodes, how)

    def plan_deletion(self, chosen: DeleteOptions) -> Deletion:
        from kdist.job.cluster import deletion

        kept: list[str] = []
        return Deletion(deletion.delete_job(self, chosen, kept), kept)

    def checkpoints(self, action: str, *arguments: str) -> dict[str, Any]:
        from kdist.job.cluster import checkpoints

        return checkpoints.run_tool(self.applied, action, *arguments, notify=self.dialog.notify)

    def export_weights(self, file: Path, *arguments: str) -> dict[str, Any]:
        from kdist.job.cluster import checkpoints

        return checkpoints.export(self.applied, file, *arguments, notify=self.dialog.notify)

    def exec(
        self,
        argv: Sequence[str],
        *,
        rank: int | None,
        pod: str,
        container: str | None,
        stdin: bool,
        tty: bool,
        **streams: Any,
    ) -> int:
        chosen = agents.choose_pod(self.applied, rank=rank, pod=pod)
        container = container or chosen.container
        how: dict[str, Any] = {"container": container, "stdin": stdin, "tty": tty, **streams}
        return self.cluster.exec(chosen.name, argv, **how)

    def forward(
        self, ports: Sequence[tuple[int, int]], *, rank: int | None, pod: str
    ) -> Iterator[Forward]:
        target = self.applied
        while True:
            chosen = agents.choose_pod(target, rank=rank, pod=pod).name
            self.cluster.check_forward(chosen, ports[0][1])
            with ExitStack() as stack:
                bound = []
                for local, remote in ports:
                    opened = self.cluster.forward(chosen, remote, local=local)
                    bound.append((stack.enter_context(opened), remote))
                    yield Forward(bound[-1][0], chosen, remote)
                ports = bound
                while any(pod.name == chosen and pod.running for pod in target.pods()):
                    time.sleep(_POLL_SECONDS)
            self.dialog.notify(f"pod {chosen} is gone; waiting for its replacement")
            agents.wait_for_pod(target, rank=rank, pod=pod)


def _identify(event: Mapping[str, Any]) -> tuple[str, str]:
    """Identity of an event; a repeated event is the same object with another version."""
    return uid(event), str(event["metadata"].get("resourceVersion"))
