"""Notes every collective of this rank in its heartbeat before it begins, whoever calls it.

An entry is written into the memory shared with the agent, so the agent knows what each rank was in,
even of one that aborted in C++.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import Follow
from kdist_trainer.liveness import Heartbeat, Phase

_Entry = tuple[str, int, str, str, str]  # operation, elements, element type, shape, group
_MOST_ENTRIES = 1024  # a model may have ever new shapes

_noted: list[FlightRecorder] = []


class FlightRecorder:
    """Writes this process's collectives into `heartbeat`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._groups: dict[str, str] = {}
        self._entries: dict[object, _Entry] = {}
        # kept also for a script, for the reason that `world.leave` gives
        self._world: ProcessGroup | None = None
        self._main = threading.main_thread().ident

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """A collective begins. It is on the way of every step: what to write is worked out once for
        each shape.
        """
        name = group.group_name
        key = (op, name, tensors[0].dtype, tensors[0].shape) if len(tensors) == 1 else None
        entry = self._entries.get(key) if key is not None else None
        if entry is None:
            entry = self._describe(op, tensors, group, name)
            if key is not None and len(self._entries) < _MOST_ENTRIES:
                self._entries[key] = entry
        op, numel, dtype, shape, label = entry
        self._heartbeat.enter(
            op, numel, dtype, shape=shape, group=label, current=self._is_current()
        )
        return None

    def wait(self, wait: Callable[[], Any], awaited: object) -> Any:  # noqa: ARG002 - it is the last one entered
        """What `wait` returns, with a note that the rank is inside for so long. One that raises was
        inside to its end.
        """
        if not self._is_current():
            return wait()
        self._heartbeat.wait()
        result = wait()
        self._heartbeat.leave()
        return result

    def _is_current(self) -> bool:
        """Whether this is what the rank waits for: not a thread of ours beside the training.
        Autograd's threads are C++'s.
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
        # between two of the group's ranks: not counted with what all of them enter
        if op in ("send", "recv"):
            label = f"{label}p2p"
        dtype = str(tensors[0].dtype) if tensors else ""
        shape = ",".join(map(str, tensors[0].shape)) if len(tensors) == 1 else ""
        return op, sum(tensor.numel() for tensor in tensors), dtype, shape, label


def _describe(group: ProcessGroup, name: str) -> str:
    """Nothing for all ranks; else a name that is the same on the members and another one on
    everybody else.
    """
    if group is dist.group.WORLD:
        return ""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return f"?{name[:20]}"  # of members that nobody knows
    return f"{name[:12]}({ranks[0]}-{ranks[-1]})" if ranks else name[:12]


def find_heartbeat() -> Heartbeat | None:
    """The file that the agent watches, if there is an agent."""
    if "KDIST_SCRATCH" not in os.environ:
        return None
    path = Path(os.environ["KDIST_SCRATCH"], f"rank-{os.environ.get('LOCAL_RANK', '0')}.heartbeat")
    if not path.exists():
        Heartbeat.create(path).close()
    heartbeat = Heartbeat.attach(path)
    heartbeat.beat(Phase.START, -1)
    return heartbeat


def note_collectives(heartbeat: Heartbeat | None) -> None:
    """Let the agent know what this rank exchanges with others, if there are any."""
    if heartbeat is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        install(heartbeat)


def install(heartbeat: Heartbeat, kind: type[FlightRecorder] = FlightRecorder) -> None:
    """From now on, for the life of this process, note all collectives in `heartbeat`; a later call
    names another one.
    """
    remove()
    _noted.append(kind(heartbeat))
    collective_hooks.listen(_noted[0])
    collective_hooks.surround(_noted[0])


def remove() -> None:
    """Note no collectives any more."""
    for former in _noted:
        collective_hooks.ignore(former)
        collective_hooks.leave(former)
    _noted.clear()
