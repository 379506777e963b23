"""Notes every collective of this rank in its heartbeat before it begins, whoever calls it.

Whatever reaches a process group - `torch.distributed`, DDP's reducer, FSDP, DTensor - goes through torch's dispatcher, as an
operator of the library `c10d`. Kernels registered there for a key that every call passes write one entry into the memory
shared with the agent and hand the call on. So the agent knows what each rank was in, even of one that aborted in C++.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from kdist_trainer.heartbeat import Heartbeat, Phase

# Operator of c10d -> (its name for people, which argument says how much each rank contributes or gets; None: nothing).
_OPERATORS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce_coalesced", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather_single", 1),
    "allgather_coalesced_": ("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced_": ("all_gather_coalesced", 1),
    "reduce_scatter_": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter_single", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_coalesced", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all_single", 1),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("monitored_barrier", None),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
_KEY = torch._C.DispatchKey.BackendSelect  # in every call, also of tensors made in inference mode

_noted: list[Recorder] = []
_held: list[object] = []


class Recorder:
    """Writes this process's collectives into `heartbeat`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._groups: dict[str, str] = {}
        self._main = threading.main_thread().ident

    def enter(self, op: str, amount: Any, group: ProcessGroup) -> None:
        """A collective begins; `amount` is a tensor, or a list of them, or None."""
        tensors = [] if amount is None else [amount] if isinstance(amount, torch.Tensor) else amount
        numel = sum(tensor.numel() for tensor in tensors)
        dtype = str(tensors[0].dtype) if tensors else ""
        shape = ",".join(map(str, tensors[0].shape)) if len(tensors) == 1 else ""
        label = self._label(group)
        if op in ("send", "recv"):  # between two of the group's ranks: not counted with what all of them enter
            label = f"{label}p2p"
        self._heartbeat.enter(op, numel, dtype, shape=shape, group=label, current=self._is_current())

    def wait(self, wait: Callable[[], Any]) -> Any:
        """What `wait` returns, with a note that the rank is inside for so long. One that raises was inside to its end."""
        if not self._is_current():
            return wait()
        self._heartbeat.wait()
        result = wait()
        self._heartbeat.leave()
        return result

    def _is_current(self) -> bool:
        """Whether this is what the rank waits for: not a thread of ours beside the training. Autograd's threads are C++'s."""
        if threading.get_ident() == self._main:
            return True
        return isinstance(threading.current_thread(), threading._DummyThread)

    def _label(self, group: ProcessGroup) -> str:
        """Nothing for all ranks; else a name that is the same on the members and another one on everybody else."""
        name = group.group_name
        label = self._groups.get(name)
        if label is None:
            label = self._groups[name] = _describe(group, name)
        return label


def _describe(group: ProcessGroup, name: str) -> str:
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


def install(heartbeat: Heartbeat) -> None:
    """From now on, for the life of this process, note all collectives in `heartbeat`; a later call names another one."""
    _noted[:] = [Recorder(heartbeat)]
    if _held:
        return
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    _held.append(library)
    for operator, (name, place) in _OPERATORS.items():
        library.impl(operator, _kernel(operator, name, place), _KEY.name, with_keyset=True)  # type: ignore[no-untyped-call]
    wait = Work.wait

    def noted(work: Work, *arguments: Any, **named: Any) -> Any:
        return _noted[0].wait(lambda: wait(work, *arguments, **named))

    Work.wait = noted  # type: ignore[method-assign, assignment]


def _differ(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they are not all of one size."""
    return any(tensor.numel() != tensors[0].numel() for tensor in tensors[1:])


def _never(_: Sequence[Any]) -> bool:
    return False


# Calls in which ranks may rightly give different amounts: NCCL has them, and gloo has all-to-all.
_UNEVEN: dict[str, Callable[[Sequence[Any]], bool]] = {
    "allgather_": lambda arguments: _differ(arguments[0][0]),
    "reduce_scatter_": lambda arguments: _differ(arguments[1][0]),
    "alltoall_": lambda arguments: _differ(arguments[0]) or _differ(arguments[1]),
    "alltoall_base_": lambda arguments: bool(arguments[3]) or bool(arguments[4]),
}


def _kernel(operator: str, name: str, place: int | None) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator).default
    uneven = _UNEVEN.get(operator, _never)

    def note(keys: Any, *arguments: Any) -> Any:
        boxed = next(each for each in arguments if isinstance(each, torch.ScriptObject))
        _noted[0].enter(
            f"{name}_uneven" if uneven(arguments) else name,
            None if place is None else arguments[place],
            ProcessGroup.unbox(boxed),
        )
        return overload.redispatch(keys.remove(_KEY), *arguments)

    return note
