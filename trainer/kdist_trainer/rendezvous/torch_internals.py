"""The private names of torch elastic that the rendezvous and the agent use, each behind a public
name.

torch may rename them in any release. `tests/trainer/rendezvous/test_torch_internals.py` compares
them with the installed torch, so that an upgrade fails there and not in a running job. All other
modules of the rendezvous and the agent use torch's public names only. The sources are
`torch/distributed/elastic/rendezvous/dynamic_rendezvous.py`,
`torch/distributed/elastic/agent/server/{api,local_elastic_agent}.py` and
`torch/distributed/elastic/multiprocessing/api.py`.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.api import (
    MultiprocessContext,
    PContext,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""The variable with which torch has rank 0 start a TCPStore in each round; the agent reads it."""

Node = _NodeDesc
"""A node as the rendezvous state lists it, with the fields `addr`, `pid` and `local_id`. Nodes get
their group ranks in the order of these fields. kdist puts the node's index into `pid` and the
agent's process id into `local_id`.
"""

State = _RendezvousState
"""The shared rendezvous state."""


def replace_polling(pause: Callable[[], object]) -> None:
    """Have torch's rendezvous, in all of this process, call `pause` before it polls instead of
    sleeping for a second.

    torch also sleeps for a random time, given as a range, before the first round and after a
    conflict. This is skipped: nodes that join have paused already (`RendezvousTimings.pace`), and
    so have writers after a conflict (`RendezvousState.sync`).

    torch also inspects the stack for the names of its methods, for events that nobody reads, which
    takes longer than all the rest; this is skipped too.
    """

    def delay(*, seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):
            pause()

    vars(dynamic_rendezvous).update(_delay=delay, get_method_name=lambda **_: "")


@contextmanager
def own_store_in_each_round() -> Iterator[None]:
    """Within the `with` block, torch has rank 0 start a TCPStore in each round. Afterwards the
    variable is restored, since workers would inherit it.
    """
    before = os.environ.get(OWN_STORE_VARIABLE)
    os.environ[OWN_STORE_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(OWN_STORE_VARIABLE, None)
        else:
            os.environ[OWN_STORE_VARIABLE] = before


def replace_port_picker(pick_port: Callable[[], int]) -> None:
    """Have torch's rendezvous take the port of the process group's store from `pick_port`."""
    vars(rendezvous_api).update(get_free_port=pick_port)


def replace_script_start(start: Callable[[Sequence[str], Mapping[str, str]], Any]) -> None:
    """Have torch's agent, in all of this process, start scripts with `start`, which gets the
    command line and the environment, and returns a substitute for the `subprocess.Popen`, or None
    to have torch start the process.
    """

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            started = start(args, env)
            return super()._popen(args, env) if started is None else started

    vars(multiprocessing_api).update(get_subprocess_handler=Handler)


class StateHolder(_BackendRendezvousStateHolder):
    """torch's copy of the shared rendezvous state, with a hook for each time it is read."""

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, *, cache_seconds: float
    ) -> None:
        super().__init__(
            backend,
            settings,
            cache_duration=cache_seconds,  # type: ignore[arg-type]  # torch only adds and compares
        )

    @property
    def is_dirty(self) -> bool:
        """Whether the next `sync` writes the state."""
        return self._dirty

    def adjust_state(self) -> None:
        """Change `self.state` after it was read, before torch removes the dead nodes from it."""

    def add_participant(self, node: Node) -> None:
        """Add a node to the participants of the open round, as torch does for its own; the round is
        complete if it is full then.
        """
        executor = _DistributedRendezvousOpExecutor(node, self, self._settings)
        executor._state = self.state
        executor._add_to_participants()
        self.mark_dirty()

    def discard(self) -> None:
        """Discard what was changed in this copy: the next `sync` reads the state."""
        self._dirty = False
        self.expire()

    @property
    def max_nodes(self) -> int:
        """The most nodes of a round."""
        return self._settings.max_nodes

    def limit_nodes(self, min_nodes: int, max_nodes: int) -> None:
        """Set the limits on the number of nodes."""
        self._settings = replace(self._settings, min_nodes=min_nodes, max_nodes=max_nodes)

    def expire(self) -> None:
        """Have the next `sync` read the state, however recent this copy is."""
        self._last_sync_time = -1

    def _sanitize(self) -> None:
        self.adjust_state()
        super()._sanitize()


class RendezvousBase(DynamicRendezvousHandler):
    """torch's dynamic rendezvous handler, with public names for the parts that torch keeps private.

    `index` is the node's place among the nodes of one address. torch would use the process id, so
    that agents on one host would get their ranks in the order in which they were started.
    """

    _state_holder: Any

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        state: StateHolder,
        *,
        address: str,
        index: int,
    ) -> None:
        super().__init__(Node(address, index, os.getpid()), settings, "c10d", store, state)

    @property
    def node(self) -> Node:
        """This node."""
        return self._this_node

    @property
    def store(self) -> Store:
        """The store of the rendezvous."""
        return self._store

    @property
    def lock(self) -> threading.Lock:
        """Held by torch's keep-alive thread while it reads or changes the state."""
        return self._heartbeat_lock

    def place(self) -> tuple[int, int]:
        """This node's group rank in the complete round, and the number of its nodes."""
        return self._get_world()

    def count_running(self) -> int:
        """The number of nodes of a complete round that this node is not in; 0 if there is none."""
        with self.lock:
            self._state_holder.sync()
            state = self._state_holder.state
            is_running = state.complete and self.node not in state.participants
            return len(state.participants) if is_running else 0

    def exchange_store(self, store: Store) -> Store:
        """The store through which the agents of a complete round exchange their ranks; `store` is
        that of the rendezvous with a prefix for the round.
        """
        return store

    def limit_nodes(self, min_nodes: int, max_nodes: int) -> None:
        """Set the limits on the number of nodes, for rounds that are not complete yet."""
        if (min_nodes, max_nodes) == (self._settings.min_nodes, self._settings.max_nodes):
            return
        self._settings = replace(self._settings, min_nodes=min_nodes, max_nodes=max_nodes)
        vars(self._op_executor)["_settings"] = self._settings
        self._state_holder.limit_nodes(min_nodes, max_nodes)

    def exit_round(self, *, timeout_seconds: float) -> None:
        """Leave the current round and send no more keep-alives. Raises `RendezvousError` if the
        state could not be changed within `timeout_seconds`.
        """
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + timeout_seconds)

    def _get_store(self) -> Store:
        return self.exchange_store(super()._get_store())


class _NothingStarted:
    """What torch's agent holds if it has started no worker."""

    def pids(self) -> dict[int, int]:
        return {}

    def close(self, *_: Any, **__: Any) -> None:
        pass


class ElasticAgentBase(LocalElasticAgent):
    """torch's local elastic agent. Subclasses replace its loop by `run_rounds`."""

    @abstractmethod
    def run_rounds(self) -> RunResult:
        """Run worker groups until the run has ended on this node."""

    def rank_environment(self) -> dict[str, str]:
        """The variables to add to torch's in the environment of every worker."""
        return {}

    def join_rendezvous(self) -> None:
        """Join the next rendezvous round and assign the ranks of `get_worker_group()`; blocks until
        the round is complete.
        """
        self._rendezvous(self.get_worker_group())

    def start_workers(
        self, local_ranks: Collection[int]
    ) -> tuple[PContext | None, dict[int, dict[str, str]]]:
        """Start the workers of these local ranks. Returns torch's handle of them, in this order, or
        None if there are none to start; and the environments of all workers, by local rank.

        torch starts all workers of a node or none, so its call that starts them is replaced: it
        gets only these workers, numbered from 0.
        """
        chosen = sorted(local_ranks)
        environments: dict[int, dict[str, str]] = {}
        started: list[PContext] = []

        def start(
            *, args: dict[int, Any], envs: dict[int, dict[str, str]], **options: Any
        ) -> PContext | _NothingStarted:
            environments.update(envs)
            if chosen:
                some = {
                    "args": {number: args[rank] for number, rank in enumerate(chosen)},
                    "envs": {number: envs[rank] for number, rank in enumerate(chosen)},
                }
                started.append(start_processes(**{**options, **some}))
            return started[0] if started else _NothingStarted()

        vars(local_elastic_agent).update(start_processes=start)
        try:
            self._start_workers(self.get_worker_group())
        finally:
            vars(local_elastic_agent).update(start_processes=start_processes)
        return (started[0] if started else None), environments

    def start_without_group(self, environments: Mapping[int, dict[str, str]]) -> PContext:
        """Start workers that are functions before there is a group for them, with these
        environments. Returns torch's handle of the workers, in the order of the keys.
        """
        spec = self.get_worker_group().spec
        assert spec.entrypoint is not None  # noqa: S101 - for the type checker: workers have one
        return start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=dict.fromkeys(range(len(environments)), spec.args),
            envs=dict(enumerate(environments[key] for key in sorted(environments))),
            logs_specs=self._logs_specs,
            start_method=self._start_method,
        )

    def set_restarts(self, count: int) -> None:
        """Set the number of restarts that workers see in TORCHELASTIC_RESTART_COUNT, which may be
        more than their limit: not all are counted against it.
        """
        self._remaining_restarts = self.get_worker_group().spec.max_restarts - count

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002 - torch's signature
        return self.run_rounds()

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env.update(self.rank_environment())

    # For each of its events, which nobody reads, torch would resolve this host's name, which may
    # take seconds.

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def _record_worker_events(self, result: RunResult) -> None:
        pass

    def _record_metrics(self, group_results: RunResult) -> None:
        pass


def worker_processes(context: PContext) -> dict[int, Any]:
    """The processes of started workers, by local rank: `multiprocessing.Process` of functions,
    `subprocess.Popen` of scripts.
    """
    if isinstance(context, MultiprocessContext):
        assert context._pc is not None  # noqa: S101 - for the type checker: the context was started
        return dict(enumerate(context._pc.processes))
    assert isinstance(context, SubprocessContext)  # noqa: S101 - torch has these two
    return {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}


def release_queues(context: PContext) -> None:
    """Drop the result queues and the event of workers that have all started: kdist uses neither,
    and they would leak when the workers are killed.
    """
    if isinstance(context, MultiprocessContext):
        context._ret_vals = {}
        context._worker_finished_event = None  # type: ignore[assignment]
