"""What `torch_internals` takes from torch elastic without documentation is as it expects.

A failure here means that the installed torch has moved one of these names. Follow the move in
`trainer/kdist_trainer/rendezvous/torch_internals.py`, for the oldest and the newest supported
torch, and run `make compat`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
)

from kdist_trainer.rendezvous import torch_internals
from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.state import RendezvousState
from kdist_trainer.rendezvous.stores import FileStore
from kdist_trainer.rendezvous.torch_internals import ElasticAgentBase, Node

# Methods of torch that are called or overridden, with their parameters.
METHODS = [
    (
        dynamic_rendezvous._BackendRendezvousStateHolder,
        "__init__",
        "backend settings cache_duration",
    ),
    (dynamic_rendezvous._BackendRendezvousStateHolder, "sync", ""),
    (dynamic_rendezvous._BackendRendezvousStateHolder, "mark_dirty", ""),
    (dynamic_rendezvous._BackendRendezvousStateHolder, "_sanitize", ""),
    (DynamicRendezvousHandler, "__init__", "node settings backend_name store state_holder"),
    (DynamicRendezvousHandler, "_stop_heartbeats", ""),
    (DynamicRendezvousHandler, "_get_world", ""),
    (DynamicRendezvousHandler, "_get_store", ""),
    (
        dynamic_rendezvous._DistributedRendezvousOpExecutor,
        "run",
        "state_handler deadline update_deadline",
    ),
    (
        dynamic_rendezvous._DistributedRendezvousOpExecutor,
        "__init__",
        "node state_holder settings",
    ),
    (dynamic_rendezvous._DistributedRendezvousOpExecutor, "_add_to_participants", ""),
    (dynamic_rendezvous._RendezvousExitOp, "__call__", "ctx deadline"),
    (SimpleElasticAgent, "_rendezvous", "worker_group"),
    (SimpleElasticAgent, "_invoke_run", "role"),
    (SimpleElasticAgent, "get_worker_group", "role"),
    (SimpleElasticAgent, "_record_worker_events", "result"),
    (SimpleElasticAgent, "_record_metrics", "group_results"),
    (SimpleElasticAgent, "record_duration", "state"),
    (LocalElasticAgent, "_start_workers", "worker_group"),
    (LocalElasticAgent, "_set_local_rank_env", "worker_env local_rank spec"),
    (SubprocessHandler, "_popen", "args env"),
]


def moved(name: str) -> str:
    """What to do about a name that is not where it was."""
    return (
        f"torch {torch.__version__} has changed {name}: adapt "
        "kdist_trainer/rendezvous/torch_internals.py and run `make compat`"
    )


@pytest.mark.parametrize(("owner", "name", "parameters"), METHODS)
def test_a_method_has_the_parameters_that_are_counted_on(
    owner: type, name: str, parameters: str
) -> None:
    method: Callable[..., object] | None = getattr(owner, name, None)
    assert method is not None, moved(f"{owner.__name__}.{name}")
    found = [one for one in inspect.signature(method).parameters if one != "self"]
    assert found == parameters.split(), moved(f"{owner.__name__}.{name}")


def test_the_loop_of_the_agent_calls_the_overridden_methods() -> None:
    run = inspect.getsource(SimpleElasticAgent.run)
    for name in ("_invoke_run", "_record_worker_events", "_record_metrics"):
        assert f"self.{name}(" in run, moved(f"SimpleElasticAgent.run, which calls {name}")
    start = inspect.getsource(LocalElasticAgent._start_workers)
    assert "self._set_local_rank_env(" in start, moved("LocalElasticAgent._start_workers")
    assert "self._pcontext = " in start, moved("LocalElasticAgent._pcontext")
    assert "_remaining_restarts" in inspect.getsource(SimpleElasticAgent), moved(
        "SimpleElasticAgent._remaining_restarts"
    )
    assert "restart_count" in start, moved("the restart count in LocalElasticAgent._start_workers")
    assert vars(local_elastic_agent)["start_processes"], moved("local_elastic_agent")
    for name in ("logs_specs", "start_method"):
        assert f"{name}=self._{name}" in start, moved(f"LocalElasticAgent._{name}")


def test_the_rendezvous_polls_by_the_replaced_functions() -> None:
    for name in ("_delay", "get_method_name"):
        assert callable(vars(dynamic_rendezvous).get(name)), moved(f"dynamic_rendezvous.{name}")
    run = inspect.getsource(dynamic_rendezvous._DistributedRendezvousOpExecutor.run)
    assert "_delay(seconds=1)" in run, moved("_DistributedRendezvousOpExecutor.run")
    assert callable(vars(rendezvous_api)["get_free_port"]), moved("rendezvous.api.get_free_port")
    build = inspect.getsource(rendezvous_api.RendezvousStoreInfo.build)
    assert "get_free_port()" in build, moved("RendezvousStoreInfo.build")
    source = inspect.getsource(dynamic_rendezvous) + inspect.getsource(DynamicRendezvousHandler)
    assert torch_internals.OWN_STORE_VARIABLE in source, moved(torch_internals.OWN_STORE_VARIABLE)


def test_a_handler_and_its_state_have_the_attributes_that_are_used(tmp_path: Path) -> None:
    handler = open_rendezvous(
        FileStore(tmp_path),
        run_id="run",
        min_nodes=1,
        max_nodes=2,
        address="127.0.0.1",
        index=3,
        timeout_seconds=1,
    )
    names = "_this_node _settings _store _state_holder _op_executor _heartbeat_lock"
    for name in names.split():
        assert name in vars(handler), moved(f"DynamicRendezvousHandler.{name}")
    assert "_settings" in vars(handler._op_executor), moved("_op_executor._settings")
    assert handler.node.addr == "127.0.0.1"
    assert handler.store is vars(handler)["_store"]
    handler.limit_nodes(2, 3)
    state = handler._state_holder
    for holder in (handler, handler._op_executor, state):
        settings: RendezvousSettings = vars(holder)["_settings"]
        assert (settings.min_nodes, settings.max_nodes) == (2, 3), moved("RendezvousSettings")
    for name in ("_last_sync_time", "_dirty"):
        assert name in vars(state), moved(f"_BackendRendezvousStateHolder.{name}")
    shared = "round complete deadline closed participants wait_list last_heartbeats"
    for name in shared.split():
        assert name in vars(state.state), moved(f"_RendezvousState.{name}")
    assert issubclass(Rendezvous, torch_internals.RendezvousBase)
    assert issubclass(RendezvousState, torch_internals.StateHolder)


def test_a_node_is_ordered_by_address_and_then_by_index() -> None:
    fields = [field.name for field in dataclasses.fields(Node)]
    assert fields == ["addr", "pid", "local_id"], moved("_NodeDesc")
    nodes = [Node("b", 0, 1), Node("a", 1, 5), Node("a", 0, 9)]
    assert sorted(nodes) == nodes[::-1], moved("the order of _NodeDesc")


def test_the_subclass_overrides_what_torch_declares() -> None:
    own = {name for name in vars(ElasticAgentBase) if name.startswith("_") and name[1] != "_"}
    for name in own - {"_abc_impl"}:
        assert hasattr(LocalElasticAgent, name), moved(f"LocalElasticAgent.{name}")


def test_contexts_of_processes_have_the_attributes_that_are_used() -> None:
    functions = inspect.getsource(MultiprocessContext)
    for name in ("_pc", "_ret_vals", "_worker_finished_event"):
        assert f"self.{name}" in functions, moved(f"MultiprocessContext.{name}")
    assert "self._pc.processes" in functions, moved("MultiprocessContext._pc.processes")
    scripts = inspect.getsource(SubprocessContext)
    assert "self.subprocess_handlers" in scripts, moved("SubprocessContext.subprocess_handlers")


def test_scripts_are_started_by_the_replaced_function(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = vars(multiprocessing_api)["get_subprocess_handler"]
    monkeypatch.setattr(multiprocessing_api, "get_subprocess_handler", usual)  # back at the end
    started: list[tuple[str, ...]] = []

    def start(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        started.append((*command, environment["RANK"]))
        return "a process" if command[0] == "ours" else None

    torch_internals.replace_script_start(start)
    make = vars(multiprocessing_api)["get_subprocess_handler"]
    use = inspect.getsource(SubprocessContext._start)
    assert "get_subprocess_handler(" in use, moved("SubprocessContext._start")
    assert inspect.signature(make).parameters.keys() == inspect.signature(usual).parameters.keys()
    shared = {
        "env": {"RANK": "3"},
        "stdout": "",
        "stderr": "",
        "local_rank_id": 0,
        "numa_options": None,
    }
    assert make(entrypoint="ours", args=("train.py", 1), **shared).proc == "a process"
    other = make(entrypoint="true", args=(), **shared).proc
    assert other.wait() == 0
    assert started == [("ours", "train.py", "1", "3"), ("true", "3")]
