"""Waiting for the cluster to have done what was asked: bounded, and saying at the end what it waited for in vain."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from kdist.errors import Code, KdistError
from kdist.status import ExitRecord, Pod, read_pod
from kdist.steer.target import Target

T = TypeVar("T")
Tell = Callable[[str], None]

EVERY_SECONDS = 0.5
_TELL_AFTER = 5.0
_LOOK_AGAIN = 5.0


def until(look: Callable[[], T | None], *, timeout: float, what: str, tell: Tell, hint: str = "", next_command: str = "") -> T:
    """What `look` gives once it is not None. Raises `KdistError` (TIMEOUT) after `timeout` seconds, naming `what`."""
    began = time.monotonic()
    told = False
    while True:
        found = look()
        if found is not None:
            return found
        waited = time.monotonic() - began
        if waited > timeout:
            raise KdistError(f"{what}: not within {timeout:.0f} s", hint=hint, next_command=next_command, code=Code.TIMEOUT)
        if not told and waited > _TELL_AFTER:
            told = True
            tell(f"waiting: {what} …")
        time.sleep(EVERY_SECONDS)


@dataclass
class Farewell:
    """What ending pods left behind: the exit record of each, as it was last seen."""

    records: dict[str, ExitRecord] = field(default_factory=dict)

    def see(self, pods: Collection[Pod]) -> None:
        """Take in what the pods say now."""
        for pod in pods:
            if pod.record is not None:
                self.records[pod.name] = pod.record

    @property
    def step(self) -> int | None:
        """The step that was saved, as far as it was told."""
        return max((record.step for record in self.records.values() if record.step is not None), default=None)

    @property
    def failures(self) -> list[tuple[str, ExitRecord]]:
        """Pods that did not save: their agents ended by something else than the wish to stop."""
        return [(pod, record) for pod, record in self.records.items() if record.code not in (0, 200)]


def see_off(target: Target, *, leaving: Collection[str], timeout: float, what: str) -> Farewell:
    """Wait until the pods named in `leaving` have ended or are gone. Raises `KdistError` (TIMEOUT) after `timeout` seconds.

    They are watched, because the record of a deleted pod is there for a moment only.
    """
    farewell, end = Farewell(), time.monotonic() + timeout
    while True:
        there = [pod for pod in target.pods() if pod.name in leaving]
        farewell.see(there)
        left = {pod.name for pod in there if not pod.over}
        if not left:
            return farewell
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        _watch(target, left, farewell, seconds=min(_LOOK_AGAIN, remaining))
    raise KdistError(
        f"{what}: {', '.join(sorted(left))} did not end within {timeout:.0f} s",
        next_command=target.command("why"),
        code=Code.TIMEOUT,
    )


def _watch(target: Target, left: set[str], farewell: Farewell, *, seconds: float) -> None:
    """See pods off until all in `left` have ended, or for so long: one may have gone just before the watch began."""
    selector = target.backend.pod_selector(target.name)
    for change, document in target.cluster.watch("v1", "Pod", selector=selector, timeout=seconds):
        pod = read_pod(document)
        if pod.name in left:
            farewell.see([pod])
            if change == "DELETED" or pod.over:
                left.discard(pod.name)
        if not left:
            return
