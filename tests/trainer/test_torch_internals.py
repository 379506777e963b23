"""What `torch_internals` takes from torch without documentation is as it expects.

A failure here means that the installed torch has moved one of these names. Follow the move in
`trainer/kdist_trainer/torch_internals.py`, for the oldest and the newest supported torch, and run
`make compat`.
"""

from __future__ import annotations

import inspect
import time
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from kdist_trainer import torch_internals
from kdist_trainer.processes import threads


def moved(name: str) -> str:
    """What to do about a name that is not where it was."""
    return (
        f"torch {torch.__version__} has changed {name}: adapt kdist_trainer/torch_internals.py and "
        "run `make compat`"
    )


def test_norms_with_running_statistics_have_a_common_class() -> None:
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)):
        assert isinstance(norm, torch_internals.BatchNorm), moved("batchnorm._BatchNorm")
        assert isinstance(norm, torch_internals.RunningNorm), moved("batchnorm._NormBase")
    instance_norm = nn.InstanceNorm2d(2)
    assert isinstance(instance_norm, torch_internals.RunningNorm), moved("batchnorm._NormBase")
    assert not isinstance(instance_norm, torch_internals.BatchNorm), moved("batchnorm._BatchNorm")


def test_a_modules_own_tensors_can_be_replaced() -> None:
    module = nn.BatchNorm1d(2)
    torch_internals.own_buffers(module)["running_mean"] = torch.ones(2)
    assert module.running_mean is not None
    assert module.running_mean.tolist() == [1, 1], moved("nn.Module._buffers")
    torch_internals.own_parameters(module)["weight"] = None
    assert module.weight is None, moved("nn.Module._parameters")


def test_a_module_tells_its_buffers_that_no_state_dict_has() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    found = torch_internals.unsaved_buffers(module)
    assert found == {"unsaved"}, moved("nn.Module._non_persistent_buffers_set")


def test_a_mesh_can_be_flattened_under_a_name() -> None:
    names = list(inspect.signature(DeviceMesh._flatten).parameters)
    assert names[:2] == ["self", "mesh_dim_name"], moved("DeviceMesh._flatten")


def test_ddp_takes_the_buckets_that_it_is_given() -> None:
    helper = inspect.getsource(DistributedDataParallel._ddp_init_helper)
    name = "dist._compute_bucket_assignment_by_size("
    assert name in helper, moved(name)
    assert "list(reversed(bucket_indices))" in helper, moved("DistributedDataParallel")


def test_functions_apply_to_the_tensors_of_a_nested_value_only() -> None:
    nested = ({"one": torch.ones(1)}, [2])
    doubled = torch_internals.tree_map_only(torch.Tensor, lambda one: one * 2, nested)
    assert doubled == ({"one": torch.full((1,), 2.0)}, [2]), moved("torch.utils._pytree")


def test_stores_are_made_as_they_are_called() -> None:
    store = torch_internals.HashStore()
    store.set("key", "value")
    assert store.get("key") == b"value", moved("torch.distributed.HashStore")
    names = str(torch_internals.TCPStore.__init__.__doc__)
    assert "is_master" in names and "wait_for_workers" in names, moved("TCPStore")  # noqa: PT018
    assert "master_listen_fd" in names, moved("TCPStore")


def test_the_store_of_a_process_group_is_made_by_the_function_that_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)
    asked: list[dict[str, Any]] = []
    torch_internals.replace_rendezvous_store(lambda **options: asked.append(options))  # type: ignore[arg-type]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    ways = rendezvous.rendezvous("tcp://127.0.0.1:29500", 0, 1)
    next(ways)
    assert asked[0] | {"timeout": None} == {
        "host_name": "127.0.0.1",
        "port": 29500,
        "world_size": 1,
        "is_master": True,
        "timeout": None,
        "multi_tenant": True,
        "use_libuv": True,
    }, moved("torch.distributed.rendezvous.TCPStore")


def test_a_group_that_was_not_formed_leaves_no_trace_in_the_names_of_the_next_one() -> None:
    world = distributed_c10d._world
    before = world.group_count
    try:
        world.group_count = 3
        torch_internals.restart_group_names()
        name = distributed_c10d._process_group_name([], use_hashed_name=False)
        assert name == "0", moved("distributed_c10d._world.group_count")
    finally:
        world.group_count = before


def test_each_process_group_is_seen_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_new_process_group_helper"
    monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    seen: list[int] = []
    torch_internals.observe_groups(seen.append)
    distributed_c10d.init_process_group(
        "gloo", store=torch_internals.HashStore(), rank=0, world_size=1
    )
    try:
        assert seen == [1], moved(name)
        distributed_c10d.new_group([0])
        init_device_mesh("cpu", (1,), mesh_dim_names=("one",))
        assert seen[:2] == [1, 1], moved(name)
    finally:
        distributed_c10d.destroy_process_group()
    distributed_c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert seen[-1] == 2, moved(name)
        before = len(seen)
        distributed_c10d.new_group([1])
        assert len(seen) == before, "it is no member of that one"
    finally:
        distributed_c10d.destroy_process_group()


def test_a_group_of_gloo_tells_its_backend_and_has_two_threads_of_a_known_name() -> None:
    before = threads.thread_ids()
    store = torch_internals.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        groups = torch_internals.all_groups()
        assert groups == [dist.group.WORLD], moved("distributed_c10d._world.pg_map")
        backend = torch_internals.gloo_backend(groups[0])
        assert callable(backend.recv), moved("ProcessGroup._get_backend")
        started = threads.thread_ids() - before
        deadline = time.monotonic() + 30
        while (
            len(found := threads.select_named(started, torch_internals.GLOO_WORKER)) < 2
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)  # a thread has its name a moment after its start
        assert len(found) == 2 or not started, moved("the name of gloo's threads")
    finally:
        dist.destroy_process_group()


def test_batches_of_loader_processes_are_counted() -> None:
    samples = TensorDataset(torch.arange(3))
    batches = iter(DataLoader(samples, num_workers=1, multiprocessing_context="fork"))
    try:
        next(batches)
        assert torch_internals.queued_batches(batches) in (0, 1, 2), moved("DataLoader._data_queue")
    finally:
        del batches
    assert torch_internals.queued_batches(iter(DataLoader(samples))) is None


def test_overflows_of_scaled_gradients_are_found_and_may_be_shared() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((weight * torch.inf).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    found = [each.item() for each in torch_internals.found_overflows(scaler, optimizer)]
    assert found == [1.0], moved("torch.amp.GradScaler._found_inf_per_device")
