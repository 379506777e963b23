"""Undocumented parts of torch by which kdist sees collectives and memory, in one place.

Every collective is an operator of the library `c10d`, and kernels for its dispatch key
`BackendSelect` are called before the backend's. The operators' names, the positions of their
arguments and the calls on the dispatcher are no public API: a release of torch may change them.
`tests/trainer/instrumentation/test_torch_internals.py` compares each with the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]  # not in its stubs
from torch.distributed import ProcessGroup, Work

_KEY = torch._C.DispatchKey.BackendSelect
"""Part of every call, also for tensors that were made in inference mode."""

COLLECTIVES = "c10d"
"""The library whose operators launch collectives."""
WAITS = "_c10d_functional"
"""The library whose operator `wait_tensor` waits for one, by the tensor that it fills."""

_POINT_TO_POINT = {int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)}
Kernel = Callable[..., Any]
"""Called with the dispatch keys and the operator's arguments; returns the operator's result."""


class Operator(NamedTuple):
    """An operator that launches a collective."""

    name: str
    """The collective's name in logs and metrics."""
    tensors_at: int | None
    """Position of the argument that says how much each rank contributes or gets; None: nothing."""


OPERATORS: dict[str, Operator] = {
    "allreduce_": Operator("all_reduce", 0),
    "allreduce_coalesced_": Operator("all_reduce_coalesced", 0),
    "broadcast_": Operator("broadcast", 0),
    "reduce_": Operator("reduce", 0),
    "allgather_": Operator("all_gather", 1),
    "_allgather_base_": Operator("all_gather_single", 1),
    "allgather_coalesced_": Operator("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced_": Operator("all_gather_coalesced", 1),
    "reduce_scatter_": Operator("reduce_scatter", 0),
    "_reduce_scatter_base_": Operator("reduce_scatter_single", 0),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter_coalesced", 0),
    "gather_": Operator("gather", 1),
    "gather_into_tensor_": Operator("gather_single", 1),  # since torch 2.15
    "scatter_": Operator("scatter", 0),
    "alltoall_": Operator("all_to_all", 1),
    "alltoall_base_": Operator("all_to_all_single", 1),
    "barrier": Operator("barrier", None),
    "monitored_barrier_": Operator("monitored_barrier", None),
    "send": Operator("send", 0),
    "recv_": Operator("recv", 0),
    "recv_any_source_": Operator("recv", 0),
}
"""By the operator's name in `c10d`; some are missing in some releases of torch."""


def operators() -> list[str]:
    """Those of `OPERATORS` that the installed torch has."""
    return [operator for operator in OPERATORS if hasattr(torch.ops.c10d, operator)]


def overload(library: str, operator: str) -> Any:
    """The default overload of an operator, such as `torch.ops.c10d.allreduce_.default`."""
    return getattr(getattr(torch.ops, library), operator).default


def argument_names(operator: str) -> list[str]:
    """Names of an operator's arguments in `c10d`, in their order."""
    return [argument.name for argument in overload(COLLECTIVES, operator)._schema.arguments]


def register_kernels(library: str, kernels: Mapping[str, Kernel]) -> torch.library.Library:
    """Have `kernels`, by operator, called instead of the operators of `library`, while what is
    returned lives or until `unregister_kernels`.
    """
    registered = torch.library.Library(library, "IMPL")  # type: ignore[no-untyped-call]
    for operator, kernel in kernels.items():
        registered.impl(operator, kernel, _KEY.name, with_keyset=True)  # type: ignore[no-untyped-call]
    return registered


def unregister_kernels(registered: torch.library.Library) -> None:
    """Take the kernels out of the dispatcher."""
    registered._destroy()  # type: ignore[no-untyped-call]


def call_original(original: Any, keys: Any, *arguments: Any) -> Any:
    """Pass a call on to what is registered behind our kernel, by the operator's `overload` and the
    dispatch keys that the kernel was called with.
    """
    return original.redispatch(keys.remove(_KEY), *arguments)


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """What runs the collectives of a group for tensors on a device: it has the group's methods, and
    they do not go through the dispatcher.
    """
    return group._get_backend(device)


def unbox_group(argument: Any) -> ProcessGroup:
    """The process group out of an operator's argument."""
    return ProcessGroup.unbox(argument)


def unbox_work(result: Any) -> Work | None:
    """The collective's handle out of an operator's result, if the backend gives one."""
    return Work.unbox(result[-1] if isinstance(result, tuple) else result)


def is_point_to_point(work: Work) -> bool:
    """Whether the handle is that of a send or a receive."""
    return work._get_op_type() in _POINT_TO_POINT  # type: ignore[attr-defined]  # not in its stubs


def is_uneven(operator: str, arguments: Sequence[Any]) -> bool:
    """Whether ranks may give different amounts in this call: NCCL allows it, and gloo's all-to-all
    does.
    """
    if operator == "allgather_":
        return _differ(arguments[0][0])
    if operator == "reduce_scatter_":
        return _differ(arguments[1][0])
    if operator == "alltoall_":
        return _differ(arguments[0]) or _differ(arguments[1])
    return operator == "alltoall_base_" and bool(arguments[3] or arguments[4])


def _differ(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are not all of one size."""
    return any(tensor.numel() != tensors[0].numel() for tensor in tensors[1:])


def storage_id(tensor: Tensor) -> int:
    """Which memory a tensor uses; defined also where `torch.compile` traces and there is none."""
    return int(_dense(tensor)[-1].untyped_storage()._cdata)


def count_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors, of a sparse one those of its indices and its values."""
    nbytes = 0
    for tensor in tensors:  # of each collective, so the common case comes without a call
        if tensor.layout is torch.strided:
            nbytes += tensor.nbytes
        else:
            nbytes += sum([part.nbytes for part in _dense(tensor)])
    return nbytes


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold what a tensor holds."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)


_MOST_ALLOCATIONS = 100_000
"""Newest allocations and frees that a history holds."""


def record_memory_history() -> None:
    """Record allocations and where they were made, once CUDA is initialized; before, torch would
    record nothing.
    """
    record = torch.cuda.memory._record_memory_history
    torch.cuda._lazy_call(  # type: ignore[no-untyped-call]
        lambda: record(max_entries=_MOST_ALLOCATIONS)
    )


def take_memory_snapshot() -> dict[str, Any]:
    """What is allocated, and the history if one is recorded."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot
