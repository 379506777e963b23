"""Records every collective of this rank in its heartbeat before it is launched, whoever calls it.

Entries go into the memory shared with the agent, so the agent knows which collective each rank was
in, also after an abort in C++.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import PostHook
from kdist_trainer.liveness import Heartbeat, Phase, heartbeat_path

_Entry = tuple[str, int, str, str, str]  # operation, elements, element type, shape, group
_MAX_ENTRIES = 1024  # a model may keep using new shapes

_installed: list[FlightRecorder] = []


class FlightRecorder:
    """Writes this process's collectives into `heartbeat`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._groups: dict[str, str] = {}
        self._entries: dict[object, _Entry] = {}
        # kept alive also for a script, for the reason given in `world.leave`
        self._world: ProcessGroup | None = None
        self._main = threading.main_thread().ident

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Record a collective. Every step passes here, so each shape is described only once."""
        name = group.group_name
        key = (op, name, tensors[0].dtype, tensors[0].shape) if len(tensors) == 1 else None
        entry = self._entries.get(key) if key is not None else None
        if entry is None:
            entry = self._describe(op, tensors, group, name)
            if key is not None and len(self._entries) < _MAX_ENTRIES:
                self._entries[key] = entry
        op, numel, dtype, shape, label = entry
        self._heartbeat.enter(
            op, numel, dtype, shape=shape, group=label, current=self._is_current()
        )
        return None

    def wait(self, wait: Callable[[], Any], awaited: object) -> Any:  # noqa: ARG002 - it is the last one entered
        """Return what `wait` returns, and record that the rank is in it meanwhile. A wait that
        raises stays recorded.
        """
        if not self._is_current():
            return wait()
        self._heartbeat.wait()
        result = wait()
        self._heartbeat.leave()
        return result

    def _is_current(self) -> bool:
        """Whether this is a thread of the training: the main one or, as Python knows nothing of
        C++'s threads, one of autograd's.
        """
        if threading.get_ident() == self._main:
            return True
        return isinstance(threading.current_thread(), threading._DummyThread)

    def _describe(
        self, op: str, tensors: Sequence[Tensor], group: ProcessGroup, name: str
    ) -> _Entry:
        label = self._groups.get(name)
        if label is None:
            label = self._groups[name] = _describe(group, name)
            if not label:
                self._world = group
        # between two ranks of the group: not counted with the collectives of all its ranks
        if op in ("send", "recv"):
            label = f"{label}p2p"
        dtype = str(tensors[0].dtype) if tensors else ""
        shape = ",".join(map(str, tensors[0].shape)) if len(tensors) == 1 else ""
        return op, sum(tensor.numel() for tensor in tensors), dtype, shape, label


def _describe(group: ProcessGroup, name: str) -> str:
    """The group's label: empty for all ranks, else one that its members share and no other group
    has.
    """
    if group is dist.group.WORLD:
        return ""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return f"?{name[:20]}"  # its members are unknown
    return f"{name[:12]}({ranks[0]}-{ranks[-1]})" if ranks else name[:12]


def find_heartbeat() -> Heartbeat | None:
    """This rank's heartbeat, which the agent watches; None without an agent."""
    if "KDIST_SCRATCH" not in os.environ:
        return None
    path = heartbeat_path(os.environ["KDIST_SCRATCH"], os.environ.get("LOCAL_RANK", "0"))
    if not path.exists():
        Heartbeat.create(path).close()
    heartbeat = Heartbeat.attach(path)
    heartbeat.beat(Phase.START, -1)
    return heartbeat


def record_collectives(heartbeat: Heartbeat | None) -> None:
    """Record this rank's collectives in `heartbeat`, unless the rank is alone or there is none."""
    if heartbeat is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        install(heartbeat)


def install(heartbeat: Heartbeat, kind: type[FlightRecorder] = FlightRecorder) -> None:
    """Record all collectives of this process in `heartbeat` from now on, instead of in an earlier
    one.
    """
    remove()
    _installed.append(kind(heartbeat))
    collective_hooks.register_launch_hook(_installed[0])
    collective_hooks.register_wait_hook(_installed[0])


def remove() -> None:
    """Stop recording collectives."""
    for recorder in _installed:
        collective_hooks.unregister_launch_hook(recorder)
        collective_hooks.unregister_wait_hook(recorder)
    _installed.clear()
