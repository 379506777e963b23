"""What `torch_internals` takes from torch without documentation is as it expects.

A failure here means that the installed torch has moved one of these names. Follow the move in
`trainer/kdist_trainer/instrumentation/torch_internals.py`, for the oldest and the newest supported
torch, and run `make compat`.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]  # not in its stubs
from torch._subclasses import FakeTensorMode
from torch.distributed import ProcessGroup, Work

from kdist_trainer.instrumentation import torch_internals
from kdist_trainer.instrumentation.torch_internals import COLLECTIVES, OPERATORS, WAITS

# First arguments of each operator of c10d: `Operator.tensors_at` and `is_uneven` count on them.
ARGUMENTS = {
    "allreduce_": "tensors process_group",
    "allreduce_coalesced_": "tensors process_group",
    "broadcast_": "tensors process_group",
    "reduce_": "tensors process_group",
    "allgather_": "output_tensors input_tensors process_group",
    "_allgather_base_": "output_tensor input_tensor process_group",
    "allgather_coalesced_": "output_lists input_list process_group",
    "allgather_into_tensor_coalesced_": "outputs inputs process_group",
    "reduce_scatter_": "output_tensors input_tensors process_group",
    "_reduce_scatter_base_": "output_tensor input_tensor process_group",
    "reduce_scatter_tensor_coalesced_": "outputs inputs process_group",
    "gather_into_tensor_": "output_tensor input_tensor process_group",
    "gather_": "output_tensors input_tensors process_group",
    "scatter_": "output_tensors input_tensors process_group",
    "alltoall_": "output_tensors input_tensors process_group",
    "alltoall_base_": "output input process_group output_split_sizes input_split_sizes",
    "barrier": "tensor process_group",
    "monitored_barrier_": "tensor process_group",
    "send": "tensors process_group",
    "recv_": "tensors process_group",
    "recv_any_source_": "tensors process_group",
}
# Those that not every supported torch has.
MISSING = {"gather_into_tensor_"}


def moved(name: str) -> str:
    """What to do about a name that is not where it was."""
    return (
        f"torch {torch.__version__} has changed {name}: adapt "
        "kdist_trainer/instrumentation/torch_internals.py and run `make compat`"
    )


@pytest.mark.parametrize("operator", torch_internals.operators())
def test_an_operator_has_the_arguments_that_are_counted_on(operator: str) -> None:
    expected = ARGUMENTS[operator].split()
    found = torch_internals.argument_names(operator)[: len(expected)]
    assert found == expected, moved(f"the arguments of torch.ops.c10d.{operator}")


def test_no_operator_that_launches_a_collective_is_overlooked() -> None:
    schemas = torch._C._jit_get_all_schemas()
    launching = {
        schema.name.removeprefix("c10d::")
        for schema in schemas
        if schema.name.startswith("c10d::")
        and any(argument.name == "process_group" for argument in schema.arguments)
    }
    assert launching == set(torch_internals.operators()), moved("the operators of torch.ops.c10d")
    assert set(OPERATORS) - launching <= MISSING, moved("the operators of torch.ops.c10d")


def test_a_handle_has_the_type_of_its_operation() -> None:
    assert callable(getattr(Work, "_get_op_type", None)), moved("Work._get_op_type")
    assert {"SEND", "RECV", "RECVANYSOURCE"} <= set(dir(OpType)), moved("OpType")


def test_the_operator_that_waits_takes_the_tensor_that_is_filled() -> None:
    original = torch_internals.overload(WAITS, "wait_tensor")
    names = [argument.name for argument in original._schema.arguments]
    assert names == ["tensor"], moved("torch.ops._c10d_functional.wait_tensor")


def test_kernels_can_be_put_in_front_of_an_operator_and_taken_away() -> None:
    signature = inspect.signature(torch.library.Library.impl)
    assert {"op_name", "fn", "dispatch_key", "with_keyset"} <= set(signature.parameters), moved(
        "torch.library.Library.impl"
    )
    assert hasattr(torch.library.Library, "_destroy"), moved("torch.library.Library._destroy")
    assert hasattr(torch._C.DispatchKey, "BackendSelect"), moved("torch._C.DispatchKey")
    assert hasattr(torch._C.DispatchKeySet, "remove"), moved("torch._C.DispatchKeySet.remove")
    original = torch_internals.overload(COLLECTIVES, "allreduce_")
    assert callable(original.redispatch), moved("torch._ops.OpOverload.redispatch")


def test_groups_and_handles_are_unboxed_from_the_dispatchers_values() -> None:
    assert callable(ProcessGroup.unbox), moved("torch.distributed.ProcessGroup.unbox")
    assert callable(Work.unbox), moved("torch.distributed.Work.unbox")


def test_a_groups_backend_reduces_a_tensor() -> None:
    assert callable(getattr(ProcessGroup, "_get_backend", None)), moved("ProcessGroup._get_backend")
    assert callable(getattr(dist.ProcessGroupGloo, "allreduce", None)), moved(
        "ProcessGroupGloo.allreduce"
    )


def test_views_of_one_storage_have_one_id_also_without_memory() -> None:
    tensor = torch.ones(4)
    ids = {torch_internals.storage_id(each) for each in (tensor, tensor[1:], tensor.view(2, 2))}
    assert len(ids) == 1, moved("torch.UntypedStorage._cdata")
    assert torch_internals.storage_id(torch.ones(4)) not in ids
    with FakeTensorMode():
        fake = torch.ones(4)
        assert torch_internals.storage_id(fake[2:]) == torch_internals.storage_id(fake)


def test_a_history_of_memory_is_recorded_once_cuda_is_initialized() -> None:
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert "max_entries" in parameters or "kwargs" in parameters
    assert not inspect.signature(torch.cuda.memory._snapshot).parameters.keys() - {
        "device",
        "augment_with_fx_traces",
    }
    waiting = len(torch.cuda._queued_calls)
    torch_internals.record_memory_history()
    if not torch.cuda.is_available():
        assert len(torch.cuda._queued_calls) == waiting + 1
    del torch.cuda._queued_calls[waiting:]
