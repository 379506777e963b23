"""A job in a cluster as the place of a drill (`kdist.drill.drill`). Its nodes are its pods.

A drill in progress is recorded in an annotation of the job's ConfigMap, with the time at which it
expires, so that the record of a command that was killed keeps nobody away for long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from http import HTTPStatus

from kdist import rbac
from kdist.cluster import ApiError, ExecSession
from kdist.drill.drill import TIMEOUT
from kdist.drill.faults import FAULTS, Fault, Situation
from kdist.drill.report import Ledger
from kdist.drill.target import FaultPlan, program_source, refuse_second
from kdist.errors import KdistError, NotFoundError
from kdist.job.cluster import agents, checkpoints
from kdist.job.cluster.applied import AppliedJob
from kdist.rbac import Right
from kdist.spec.validators import SCRATCH_MOUNT
from kdist.status import Pod, documents
from kdist.status.documents import condition, items
from kdist.status.job_status import NO_WORKLOAD
from kdist.units import moment

ANNOTATION = "kdist.dev/drill"
_TIMEOUT = 1.0  # seconds for one response of an agent


class ClusterDrillTarget:
    """A job in a cluster."""

    interval = 0.25

    def __init__(self, target: AppliedJob, *, timeout: float | None) -> None:
        self._target = target
        self._limit = TIMEOUT if timeout is None else timeout
        self._unreturnable: dict[str, str] | None = None

    def look(self, *, without: str = "") -> Situation:
        target = self._target
        pods = [pod for pod in target.pods() if pod.running and not pod.deleting]
        asked = [pod for pod in pods if pod.name != without]
        samples = agents.fetch_samples(target, asked, timeout=_TIMEOUT)
        return Situation(
            name=target.name,
            place="cluster",
            config=target.job.to_document()["spec"],
            nodes=tuple(pod.name for pod in pods),
            documents={pod: sample.status for pod, sample in samples.items()},
            has_checkpoints=checkpoints.has_checkpoints(target),
            rendezvous=target.placement.rendezvous,
            inactive=self._find_inactive(),
            unreturnable=self._find_unreturnable(pods),
            check=target.command("status"),
        )

    def _find_inactive(self) -> str:
        try:
            state = self._target.state()
        except NotFoundError:
            return NO_WORKLOAD
        if state.finished:
            return f"it has {state.finished}"
        return "it is suspended" if state.suspended else ""

    def _find_unreturnable(self, pods: Sequence[Pod]) -> Mapping[str, str]:
        """The pods that no node would take again, of a job that needs all of them. Empty if the
        user may not list nodes. Looked up once.
        """
        if self._unreturnable is None:
            self._unreturnable = {}
            if len(pods) <= self._target.job.spec.nodes.min and not self._has_room():
                reason = "it needs this node, and every node of the cluster is cordoned or NotReady"
                self._unreturnable = {pod.name: reason for pod in pods}
        return self._unreturnable

    def _has_room(self) -> bool:
        try:
            nodes = self._target.cluster.list("v1", "Node")
        except ApiError:
            return True
        return not nodes or any(
            not documents.at(node, "spec", "unschedulable")
            and documents.text(condition(node, "Ready"), "status") == "True"
            for node in nodes
        )

    def read_ledger(self) -> Ledger:
        """See `DrillTarget.read_ledger`. Empty while no pod runs that could read it; that of a job
        which has ended is read by a helper pod.
        """
        target = self._target
        runs = any(pod.running and not pod.deleting for pod in target.pods())
        if not runs and not self._find_inactive():
            return Ledger()
        try:
            found = checkpoints.run_tool(target, "ledger", notify=lambda _: None)
        except (KdistError, OSError):
            return Ledger()
        return Ledger(items(found, "events"), items(found, "steps"))

    def find_drill(self) -> str:
        return _describe(self._target.cluster.get("v1", "ConfigMap", self._target.name))

    def find_forbidden(self) -> Mapping[Fault, str]:
        found: dict[Fault, str] = {}
        for fault in FAULTS:
            missing = rbac.find_missing(self._target.cluster, self._rights(fault))
            if missing:
                found[fault] = ", ".join(dict.fromkeys(map(str, missing)))
        return found

    def require_rights(self, fault: Fault) -> None:
        rbac.require(self._target.cluster, self._rights(fault))

    def _rights(self, fault: Fault) -> list[Right]:
        """Rights to record the drill, to strike, and to read the ledger."""
        wanted = [Right("patch", "v1", "ConfigMap", name=self._target.name), *rbac.EXEC]
        return [*wanted, *rbac.on_pods("delete")] if fault == "pod" else wanted

    @contextmanager
    def claim(self, plan: FaultPlan) -> Iterator[None]:
        target = self._target
        found = target.cluster.get("v1", "ConfigMap", target.name)
        target.owner.check(found, api_version="v1", kind="ConfigMap")
        if other := _describe(found):
            raise refuse_second(target.name, other)
        expires = time.time() + plan.seconds + self._limit
        body = {"metadata": {"annotations": {ANNOTATION: f"{expires:.0f} {plan.fault}"}}}
        try:
            target.objects.change("v1", "ConfigMap", target.name, body, known=found)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            raise KdistError(
                f"{target.name} was changed meanwhile, perhaps by another drill: nothing was hurt",
                hint="try again",
            ) from error
        try:
            yield
        finally:
            with suppress(KdistError):
                target.annotate({ANNOTATION: None})

    def start_program(self, plan: FaultPlan, action: str) -> AbstractContextManager[ExecSession]:
        options = [*plan.arguments, "--scratch", SCRATCH_MOUNT]
        command = ["python", "-c", program_source(), action, *options]
        container = self._target.backend.container
        return self._target.cluster.session(plan.node, command, container=container)

    def delete_pod(self, node: str) -> bool:
        """See `DrillTarget.delete_pod`. A StatefulSet would start a pod of the same name while
        the old one may still run: there the pod gets one second.
        """
        grace = 1 if self._target.backend.name == "statefulset" else 0
        if not self._target.pod_objects().remove("v1", "Pod", node, grace=grace):
            raise KdistError(f"pod {node} is gone already: nothing was hurt")
        return True


def _describe(config_map: Mapping[str, object]) -> str:
    """The drill that the job's ConfigMap records; empty if there is none, or it has expired."""
    expires, _, fault = documents.annotation(config_map, ANNOTATION).partition(" ")
    if not expires.isdecimal() or int(expires) < time.time():
        return ""
    until = moment(float(expires))
    return f"{fault}, until {until} at most, as ConfigMap {documents.name(config_map)} says"
