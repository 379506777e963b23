"""Hooks on every collective of this process: one when it begins, one around each wait for it.

Everything that reaches a process group (`torch.distributed`, DDP's reducer, FSDP, DTensor) goes
through torch's dispatcher as an operator of the library `c10d`. Kernels registered there call the
listeners and pass the call on unchanged. `torch.distributed` waits in `Work.wait`; DTensor and
compiled code wait in an operator that takes the tensor which the collective fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

Follow = Callable[[Work], object]
"""Told of a collective's handle once it was launched."""


class Listener(Protocol):
    """Who is told of each collective, on the thread that launches it."""

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """The collective `op` is about to be launched. `tensors`: how much each rank contributes or
        gets; none for a barrier.
        """
        ...


# Operator of c10d -> (its name for people, which argument says how much each rank contributes or
# gets; None: nothing).
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

_listeners: list[Listener] = []
_kernels: list[torch.library.Library] = []


def listen(listener: Listener) -> None:
    """Tell `listener` of every collective from now on; those that came last are told first."""
    if not _listeners:
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for operator, (name, place) in _OPERATORS.items():
            library.impl(operator, _kernel(operator, name, place), _KEY.name, with_keyset=True)  # type: ignore[no-untyped-call]
        _kernels.append(library)
    _listeners.insert(0, listener)


def ignore(listener: Listener) -> None:
    """Tell `listener` of nothing any more. When nobody is left, collectives go their way as if
    there had been nobody.
    """
    _listeners[:] = [other for other in _listeners if other is not listener]
    if not _listeners and _kernels:
        _kernels.pop()._destroy()  # type: ignore[no-untyped-call]


def listeners() -> tuple[Listener, ...]:
    """Who listens, in the order of `listen`."""
    return tuple(reversed(_listeners))


def _differ(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they are not all of one size."""
    return any(tensor.numel() != tensors[0].numel() for tensor in tensors[1:])


# Calls in which ranks may rightly give different amounts: NCCL has them, and gloo has all-to-all.
_UNEVEN: dict[str, Callable[[Sequence[Any]], bool]] = {
    "allgather_": lambda arguments: _differ(arguments[0][0]),
    "reduce_scatter_": lambda arguments: _differ(arguments[1][0]),
    "alltoall_": lambda arguments: _differ(arguments[0]) or _differ(arguments[1]),
    "alltoall_base_": lambda arguments: bool(arguments[3]) or bool(arguments[4]),
}


def _kernel(operator: str, name: str, place: int | None) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator).default
    group_at = [argument.name for argument in overload._schema.arguments].index("process_group")
    uneven = _UNEVEN.get(operator)

    def tell(keys: Any, *arguments: Any) -> Any:
        amount = () if place is None else arguments[place]
        tensors = (amount,) if isinstance(amount, Tensor) else amount
        op = f"{name}_uneven" if uneven is not None and uneven(arguments) else name
        group = ProcessGroup.unbox(arguments[group_at])
        followers = [listener.begin(op, tensors, group) for listener in _listeners]
        result = overload.redispatch(keys.remove(_KEY), *arguments)
        for follow in followers:
            if follow is not None:
                follow(Work.unbox(result[-1] if isinstance(result, tuple) else result))
        return result

    return tell


Wait = Callable[[], Any]


class WaitHook(Protocol):
    """Who calls each wait."""

    def wait(self, wait: Wait, awaited: Work | Tensor) -> Any:
        """Return what `wait` returns; on the thread that waits."""
        ...


_surroundings: list[WaitHook] = []
_wait_kernels: list[torch.library.Library] = []


def surround(surrounding: WaitHook) -> None:
    """Let `surrounding` call every wait from now on; those that came last are further outside."""
    if not _wait_kernels:
        _install()
    _surroundings.append(surrounding)


def leave(surrounding: WaitHook) -> None:
    """Let `surrounding` call no wait any more."""
    _surroundings[:] = [other for other in _surroundings if other is not surrounding]


def _call(wait: Wait, awaited: Work | Tensor) -> Any:
    for surrounding in _surroundings:
        wait = partial(surrounding.wait, wait, awaited)
    return wait()


def _install() -> None:
    """For the life of this process: what others have put around `Work.wait` since would be lost if
    it were taken back.
    """
    bare = Work.wait

    def wait(work: Work, *arguments: Any, **named: Any) -> Any:
        return _call(partial(bare, work, *arguments, **named), work)

    Work.wait = wait  # type: ignore[method-assign, assignment]
    operator = torch.ops._c10d_functional.wait_tensor.default
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(  # type: ignore[no-untyped-call]
        "wait_tensor",
        lambda keys, tensor: _call(partial(operator.redispatch, keys.remove(_KEY), tensor), tensor),
        _KEY.name,
        with_keyset=True,
    )
    _wait_kernels.append(library)
