"""torch's dynamic (c10d) rendezvous as kdist runs it: the same protocol, other timings, and a way to leave it.

torch polls once a second and notices a dead node after fifteen; both are right for a thousand nodes and slow for four. What
torch lets one set is set here; two of its delays have no setting and are replaced. The names with an underscore are torch's
own: a test holds that they are still there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Pace:
    """Timings in seconds. They grow with the number of nodes, so that a store sees about the same load from any job."""

    poll: float
    keep_alive: float
    keep_alive_attempts: int
    last_call: float
    first_call: float
    """The last call of a job's first round: nodes that start together are seldom ready together."""

    @classmethod
    def for_nodes(cls, nodes: int) -> Pace:
        """What suits a job of at most `nodes` nodes."""
        return cls(
            poll=min(1.0, 0.05 * max(1.0, nodes / 4)),
            keep_alive=max(1.0, nodes / 32),
            keep_alive_attempts=3,
            last_call=0.5 + nodes / 32,
            first_call=5.0 + nodes / 32,
        )


@dataclass(frozen=True)
class News:
    """What the rendezvous says to an agent whose ranks are at work: `waiting` nodes want to join; no more rounds if `closed`."""

    waiting: int
    closed: bool


class Rendezvous(DynamicRendezvousHandler):
    """A `RendezvousHandler` for `LocalElasticAgent`; make it with `open_rendezvous`."""

    pace: Pace

    @property
    def use_agent_store(self) -> bool:
        """Ranks make a store of their own in each round: a shared one keeps the addresses of dead ranks."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; blocks until it is complete. Raises `RendezvousTimeoutError`, `RendezvousClosedError`."""
        self._state_holder.sync()
        call = self.pace.first_call if self._state_holder.state.round == 0 else self.pace.last_call
        self.settings.timeout._set_timeouts(last_call=timedelta(seconds=call))
        with _environment(_OWN_STORE, "1"), _delays(self.pace.poll):
            return super().next_rendezvous()

    def news(self) -> News:
        """What the state says now; it is read from the store at most once per `Pace.poll`."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            state = self._state_holder.state
            return News(waiting=len(state.wait_list), closed=state.closed)

    def members(self) -> int:
        """How many nodes the current round still has."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            return len(self._state_holder.state.participants)

    def leave(self) -> None:
        """Give up this node's place, so that the others need not wait until its keep-alives are missed."""
        self._stop_heartbeats()
        with _delays(self.pace.poll):
            self._op_executor.run(torch_dynamic._RendezvousExitOp(), time.monotonic() + self.pace.keep_alive)

    def evict(self, pid: int) -> None:
        """Take a dead process of this host out of the state at once: the predecessor of an agent that was restarted."""
        for _ in range(10):
            self._state_holder.sync()
            beats = self._state_holder.state.last_heartbeats
            dead = [node for node in beats if node.addr == self._this_node.addr and node.pid == pid]
            if not dead:
                return
            for node in dead:
                beats[node] = datetime.min.replace(tzinfo=UTC)  # reading the state back drops nodes without a pulse
            self._state_holder.mark_dirty()
            self._state_holder.sync()


def open_rendezvous(
    store: dist.Store, *, run_id: str, min_nodes: int, max_nodes: int, address: str | None, timeout_seconds: float
) -> Rendezvous:
    """A rendezvous of run `run_id` whose state lives in `store`. `address` is where this node's ranks listen, None: its name.

    Raises `RendezvousConnectionError` when the store cannot be reached.
    """
    pace = Pace.for_nodes(max_nodes)
    handler = Rendezvous.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(store, run_id),
        min_nodes,
        max_nodes,
        address,
        RendezvousTimeout(join=timedelta(seconds=timeout_seconds), last_call=timedelta(seconds=pace.last_call)),
        keep_alive_interval=pace.keep_alive,
        keep_alive_max_attempt=pace.keep_alive_attempts,
    )
    handler.pace = pace
    handler._state_holder._cache_duration = pace.poll
    return handler


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a while: torch reads this one in the agent, and the ranks shall not inherit it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _delays(seconds: float) -> Iterator[None]:
    """Let torch's executor wait so long between two looks at the state, instead of a whole second."""
    module = vars(torch_dynamic)
    before: Callable[..., None] = module["_delay"]
    module["_delay"] = lambda **_: time.sleep(seconds)
    try:
        yield
    finally:
        module["_delay"] = before
