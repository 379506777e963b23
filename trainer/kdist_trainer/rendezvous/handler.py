"""torch's dynamic (c10d) rendezvous with kdist's timings, and a way to leave it.

torch polls once a second, notices a dead node after fifteen, and holds each round open for half a
minute, which suits a thousand nodes and is slow for four. The protocol is unchanged. The names with
an underscore are torch's own; a test checks that they still exist.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous import api as torch_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
)

from kdist_trainer.rendezvous.file_store import FileStore
from kdist_trainer.rendezvous.ports import pick_port

JITTER = random.SystemRandom()
"""Spreads the agents' requests. It is not the module's generator, which user code may have
seeded.
"""


@dataclass(frozen=True)
class RendezvousTimings:
    """Timings in seconds. They grow with the number of nodes, so that a store sees about the same
    load from any job.
    """

    poll: float
    """Between two looks at the state while a group forms."""
    watch: float
    """The same while it is at work."""
    keep_alive: float
    """Between two signs of life; a node without `keep_alive_attempts` of them in a row is taken for
    dead.
    """
    keep_alive_attempts: int
    spread: float
    """Over how long nodes spread at most that want to change the state at the same time."""
    last_call: float
    """How long a round with enough nodes waits for more when nobody is known to be on the way."""
    patience: float
    """How long it waits at most for those that are, and in the first round for all: nodes are
    seldom ready together.
    """

    @classmethod
    def for_nodes(cls, nodes: int, *, remote: bool = False) -> RendezvousTimings:
        """What suits a job of at most `nodes` nodes; if `remote`, each look and each sign of life
        asks an API server.
        """
        call = {"last_call": 0.3 + nodes / 64, "patience": 5.0 + nodes / 32}
        if remote:  # at work about five changes and a dozen looks a second, from however many nodes
            return cls(
                poll=min(1.0, max(0.1, nodes / 64)),
                watch=max(1.0, nodes / 12),
                keep_alive=max(1.0, nodes / 5),
                keep_alive_attempts=4 if nodes <= 8 else 3,
                spread=min(2.0, max(0.1, nodes * 0.03)),
                **call,
            )
        return cls(
            poll=min(1.0, max(0.05, nodes / 80)),
            watch=min(1.0, max(0.05, nodes / 80)),
            keep_alive=max(1.0, nodes / 32),
            keep_alive_attempts=3,
            spread=min(0.5, max(0.02, nodes * 0.002)),
            **call,
        )


_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


_AGES = timedelta(days=3650)
_RACE_SECONDS = 0.01
Bounds = tuple[int, int]


class _State(_BackendRendezvousStateHolder):
    """torch's view of the shared state, with other rules for closing a round and for declaring a
    node dead.

    A round is closed as soon as everybody who is known to be there has joined it. Nodes that want
    in, or have left the round before, stand in the wait list: an elastic group that forms without
    one of them would have to form again at once.

    A node is dead when its sign of life has stood still for so long as this node could see; torch
    compares the clocks of two nodes, and takes all for dead once the store comes back that was
    away. A group at work loses nobody for that alone: a silent node of it is evicted by a member
    that has left the group, or by anybody once all of them are silent.
    """

    def __init__(
        self, backend: C10dRendezvousBackend, settings: RendezvousSettings, pace: RendezvousTimings
    ) -> None:
        # By these settings torch itself takes for dead only who is marked so.
        super().__init__(
            backend,
            replace(settings, keep_alive_interval=_AGES),
            cache_duration=pace.poll,  # type: ignore[arg-type]  # torch only adds and compares it
        )
        self.pace = pace
        self.silent: set[Any] = set()
        """Nodes that should give a sign of life and do not."""
        self.refresh: Callable[[], object] = _change_nothing
        """Called at every look: bounds may have changed."""
        self.node: Any = None
        """Whose view this is."""
        self._member_of: int | None = None
        self._pulses: dict[Any, tuple[datetime, float]] = {}
        self._looked = time.monotonic()
        self._lost_races = 0

    def sync(self) -> bool | None:
        """See base class."""
        self.refresh()
        done = super().sync()
        state, pace = self.state, self.pace
        if done is not None:
            self._lost_races = 0 if done else self._lost_races + 1
            # torch tries again at once: many nodes would do nothing but get into each other's way.
            time.sleep(
                JITTER.uniform(0, min(pace.spread, _RACE_SECONDS * 2**self._lost_races))
                if not done
                else 0
            )
        if (
            state.deadline is not None
            and not state.complete
            and state.round > 0
            and not state.wait_list
        ):
            opened = state.deadline - timedelta(seconds=pace.patience)
            if datetime.now(UTC) > opened + timedelta(seconds=pace.last_call):
                state.deadline = opened  # seen here only, unless this node closes the round now
        return done

    def _sanitize(self) -> None:
        """See base class; called whenever the state was read."""
        state, pace, now = self.state, self.pace, time.monotonic()
        passed, self._looked = min(now - self._looked, pace.keep_alive), now
        pulses = {}
        for node, beat in state.last_heartbeats.items():
            before, still = self._pulses.get(node, (beat, -passed))
            pulses[node] = (beat, still + passed if beat == before else 0.0)
        self._pulses = pulses
        self.silent = {
            node
            for node, (_, still) in pulses.items()
            if still > pace.keep_alive * pace.keep_alive_attempts
        }
        if self.node in state.participants:
            self._member_of = state.round
        has_left = self.node not in state.participants and self._member_of == state.round
        over = not state.complete or has_left or state.participants.keys() <= self.silent
        for node in self.silent if over else self.silent - state.participants.keys():
            state.last_heartbeats[node] = datetime.min.replace(tzinfo=UTC)
        super()._sanitize()


@dataclass(frozen=True)
class RendezvousStatus:
    """What the rendezvous says to an agent whose ranks are at work.

    `waiting` nodes want to join; `left` nodes of the group have left it or were evicted, and it
    never gets them back; `silent` ones give no sign of life; there will be no more rounds if it is
    `closed`.
    """

    waiting: int
    left: int
    silent: int
    closed: bool


class Rendezvous(DynamicRendezvousHandler):
    """A `RendezvousHandler` for `LocalElasticAgent`; make it with `open_rendezvous`."""

    _state_holder: _State

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        *,
        address: str | None,
        index: int,
        state: _State,
        bounds: Callable[[], Bounds],
    ) -> None:
        # torch ranks the nodes in the order of these fields and has the process id second: agents
        # on one host would get their ranks in the order in which they were started.
        node = _NodeDesc(address or socket.getfqdn(), index, os.getpid())
        super().__init__(node, settings, "c10d", store, state)
        self.pace = state.pace
        self._bounds = bounds
        state.refresh = self._refresh
        state.node = node
        self._group: set[Any] = set()

    def _refresh(self) -> None:
        least, most = self._bounds()
        if (least, most) != (self._settings.min_nodes, self._settings.max_nodes):
            self._settings = replace(self._settings, min_nodes=least, max_nodes=most)
            executor, state = vars(self._op_executor), vars(self._state_holder)
            executor["_settings"] = self._settings
            state["_settings"] = replace(state["_settings"], min_nodes=least, max_nodes=most)

    @property
    def use_agent_store(self) -> bool:
        """Ranks make a store of their own in each round: a shared one keeps the addresses of dead
        ranks.
        """
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; blocks until it is complete. Raises `RendezvousTimeoutError`,
        `RendezvousClosedError`.
        """
        self._group = set()
        with _environment(_OWN_STORE, "1"):
            found = super().next_rendezvous()
        self._group = set(self._state_holder.state.participants)
        return found

    @contextmanager
    def watching_departures(self) -> Iterator[None]:
        """In a shared folder, stop waiting for the keys of a node that has left this round or was
        evicted.
        """
        store = self._store
        if isinstance(store, FileStore):
            store.while_waiting = self._check_departures
        try:
            yield
        finally:
            if isinstance(store, FileStore):
                store.while_waiting = None

    def _check_departures(self) -> None:
        with suppress(RendezvousError):
            if left := self.news().left:
                raise DistStoreError(
                    f"{left} other nodes have left the group before it was complete"
                )

    def news(self) -> RendezvousStatus:
        """What the state says now; it is read from the store at most once per
        `RendezvousTimings.poll`.
        """
        with self._heartbeat_lock:
            self._state_holder.sync()
            state = self._state_holder.state
            silent = self._state_holder.silent & self._group & state.participants.keys()
            # who cannot get a sign of life through cannot judge who does not give one
            if self._this_node in silent:
                silent = set()
            return RendezvousStatus(
                waiting=len(state.wait_list - self._group),
                left=len(self._group - state.participants.keys()),
                silent=len(silent),
                closed=state.closed,
            )

    def members(self) -> int:
        """How many nodes the current round still has."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            return len(self._state_holder.state.participants)

    def leave(self) -> None:
        """Give up this node's place, so that the others need not wait until its keep-alives are
        missed.
        """
        self._stop_heartbeats()
        self._op_executor.run(
            torch_dynamic._RendezvousExitOp(), time.monotonic() + self.pace.keep_alive
        )

    def evict(self, pids: Collection[int]) -> None:
        """Take dead processes of this host out of the state at once: an agent's predecessors."""
        for _ in range(10):
            self._state_holder.sync()
            beats = self._state_holder.state.last_heartbeats
            dead = [
                node
                for node in beats
                if node.addr == self._this_node.addr and node.local_id in pids
            ]
            if not dead:
                return
            for node in dead:
                # reading the state back drops nodes without a pulse
                beats[node] = datetime.min.replace(tzinfo=UTC)
            self._state_holder.mark_dirty()
            self._state_holder.sync()


def open_rendezvous(
    store: Store,
    *,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    address: str | None,
    index: int,
    timeout_seconds: float,
    state_store: Store | None = None,
    remote: bool = False,
    bounds: Callable[[], Bounds] | None = None,
) -> Rendezvous:
    """A rendezvous of run `run_id` whose state lives in `store`. `address` is where this node's
    ranks listen, None: its name. Nodes of one address have their ranks in the order of `index`.

    The state is read and written through `state_store`, another view of the same store. `remote` as
    for `RendezvousTimings`. `bounds` says at any time how many nodes there may be, `min_nodes` and
    `max_nodes` if nothing else. Raises `RendezvousConnectionError` when the store cannot be
    reached.
    """
    pace = RendezvousTimings.for_nodes(max_nodes, remote=remote)
    _shorten_torch_poll(pace.poll)
    vars(torch_api).update(get_free_port=pick_port)
    settings = RendezvousSettings(
        run_id,
        min_nodes,
        max_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=timeout_seconds),
            last_call=timedelta(seconds=pace.patience),
            heartbeat=timedelta(seconds=max(5.0, 2 * pace.keep_alive)),
        ),
        keep_alive_interval=timedelta(seconds=pace.keep_alive),
        keep_alive_max_attempt=pace.keep_alive_attempts,
    )
    state = _State(C10dRendezvousBackend(state_store or store, run_id), settings, pace)
    return Rendezvous(
        store,
        settings,
        address=address,
        index=index,
        state=state,
        bounds=bounds or (lambda: (min_nodes, max_nodes)),
    )


def _change_nothing() -> None:
    """The bounds stay."""


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a while: torch reads this one in the agent, and the ranks shall not
    inherit it.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _shorten_torch_poll(seconds: float) -> None:
    """Let torch's executor, in all of this process, wait so long between two looks at the state,
    instead of a whole second.

    And let it not find out its own methods' names from the stack for events that nobody reads: that
    takes longer than all else.
    """
    vars(torch_dynamic).update(
        _delay=lambda **_: time.sleep(seconds), get_method_name=lambda **_: ""
    )
