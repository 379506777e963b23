"""The control channel between an agent and its ranks, by which a rank leaves a broken worker group
and joins the next one without ending, or waits for its first one.

Each rank connects to a Unix socket in the agent's scratch folder. Messages are JSON objects, one
per packet:

    rank to agent   {"rank": 0, "pid": 123}        after connecting; the local rank
                    {"left": 17, "why": "..."}     out of its group, with the state of step 17;
                                                   -1 from a rank that has had no group yet
                    {"crowd": 17}                  so many groups that it has left are waited in
    agent to rank   {"leave": true}                leave the group
                    {"join": {"RANK": "0", ...}}   the environment of the next group
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.distributed import group_abort
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json, parse_object
from kdist_trainer.metrics.transport import short_address
from kdist_trainer.processes.descriptors import spend
from kdist_trainer.processes.threads import OnError, start_thread

VARIABLE = "KDIST_CONTROL_SOCKET"
"""The environment variable that names the agent's socket."""
WAITING_VARIABLE = "KDIST_WAITS_FOR_GROUP"
"""The environment variable of a worker that was started before its group: its other variables are
not those of the group yet. Its value is one of `IDLE` and `PREBUILD`.
"""
IDLE, PREBUILD = "idle", "prebuild"
"""What such a worker does before it waits: nothing of the user's; it builds what needs no group."""
STOPS_VARIABLE = "KDIST_STOPS"
"""The environment variable of a worker whose next group has only this rank, which saves what it has
kept and ends.
"""
_MESSAGE_BYTES = 1 << 16
_CUT_SECONDS = 0.05
_WHY_CHARACTERS = 500


class GroupControl:
    """A rank's end of the channel.

    Its thread cuts the connections of the process group when the agent asks the rank to leave, so
    that a collective which waits for a silent peer raises in the main thread.
    """

    def __init__(self, path: Path, *, local_rank: int, on_leave: Callable[[bool], object]) -> None:
        """Connect to the agent's socket at `path`. `on_leave` is called from the channel's thread
        with True when the agent asks this rank to leave its group, and with False when there is a
        new one. Raises `OSError` if the agent cannot be reached.
        """
        self._on_leave = on_leave
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_address(path) as address:
            self._socket.connect(address)
        self._asked_to_leave = threading.Event()
        self._left = threading.Event()
        self._joined = threading.Event()
        self._environment: dict[str, str] = {}
        self._send(rank=local_rank, pid=os.getpid())
        start_thread(self._receive, name="group-control", on_error=OnError.RESTART)

    @classmethod
    def connect(cls, on_leave: Callable[[bool], object]) -> GroupControl | None:
        """The channel to this rank's agent; None if the agent restarts ranks instead, or cannot be
        reached.
        """
        path = os.environ.get(VARIABLE)
        if path is None or not group_abort.is_supported():
            return None
        try:
            made = cls(Path(path), local_rank=int(os.environ["LOCAL_RANK"]), on_leave=on_leave)
        except OSError as error:
            log.warn("control-unreachable", message=f"this rank cannot continue in place: {error}")
            return None
        group_abort.enable()
        return made

    @property
    def asked_to_leave(self) -> bool:
        """Whether the agent has asked this rank to leave its group."""
        return self._asked_to_leave.is_set()

    def report_left(self, step: int, why: str) -> None:
        """Tell the agent that this rank is out of its group, by the error `why`, and keeps the
        state of `step`, the last finished one; -1 if it has no state yet.
        """
        self._left.set()
        self._send(left=step, why=why[:_WHY_CHARACTERS])

    def report_crowd(self, groups: int) -> None:
        """Tell the agent how many groups that this rank has left are still waited in, if they are
        too many; 0 when they are no longer.
        """
        self._send(crowd=groups)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def wait_for_group(self) -> dict[str, str]:
        """Wait until the agent has joined the next group; returns the rank's environment in it."""
        self._joined.wait()
        self._joined.clear()
        return self._environment

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while packet := self._socket.recv(_MESSAGE_BYTES):
                message = parse_json(packet, keep_surrogates=True)
                if "leave" in message:
                    self._asked_to_leave.set()
                    self._on_leave(True)
                    # again and again: the group may be opening connections just now
                    while not self._left.is_set():
                        group_abort.abort()
                        self._left.wait(_CUT_SECONDS)
                elif "join" in message:
                    self._environment = message["join"]
                    self._on_leave(False)
                    self._asked_to_leave.clear()
                    self._left.clear()
                    self._joined.set()

    def _send(self, **message: Any) -> None:
        # if the agent is dead, the parent-death pipe ends this rank
        with contextlib.suppress(OSError):
            self._socket.send(encode_json(message).encode())


@dataclass
class ConnectedRank:
    """A rank as its agent sees it.

    Attributes:
        pid: The rank's process id.
        connection: The socket.
        left: The step whose state it keeps since it left its group, -1 for none; None while it is
            in a group.
        why: The error that ended the group for it.
        crowd: The groups that it has left and that are still waited in, if they are too many, as it
            has told since it joined its group.
    """

    pid: int
    connection: socket.socket
    left: int | None = None
    why: str = ""
    crowd: int = 0


@dataclass
class ControlServer:
    """The agent's end of the channel to its ranks."""

    path: Path
    ranks: dict[int, ConnectedRank] = field(default_factory=dict)
    """The connected ranks, by local rank."""
    joining: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)
    """By local rank, the pid of a worker that is not ready for its group yet, and its environment
    in that group.
    """

    def __post_init__(self) -> None:
        self._unknown: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.setblocking(False)
        self.path.unlink(missing_ok=True)
        with short_address(self.path) as address:
            self._server.bind(address)
        self._server.listen()

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a message arrives."""
        connections = [*self._unknown, *(rank.connection for rank in self.ranks.values())]
        return [self._server.fileno(), *(one.fileno() for one in connections)]

    def poll(self) -> None:
        """Read the messages that have arrived; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = spend(self._server.accept)
                connection.setblocking(False)
                self._unknown.append(connection)
        for connection in list(self._unknown):
            message = _read(connection)
            if message is not None:
                self._unknown.remove(connection)
                if message:
                    self._forget(message["rank"])
                    self.ranks[message["rank"]] = ConnectedRank(message["pid"], connection)
                else:
                    connection.close()
        for number, rank in list(self.ranks.items()):
            while (message := _read(rank.connection)) is not None:
                if not message:
                    self._forget(number)
                    break
                rank.crowd = message.get("crowd", rank.crowd)
                if "left" in message:
                    rank.left, rank.why = message["left"], message["why"]
        for number, (pid, environment) in list(self.joining.items()):
            if self.has_left(number, pid):
                del self.joining[number]
                self.join(number, environment)

    def has_left(self, local_rank: int, pid: int) -> bool:
        """Whether a rank is out of its group, or is ready for its first one."""
        rank = self.ranks.get(local_rank)
        return rank is not None and rank.pid == pid and rank.left is not None

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most `seconds`, and read it."""
        select.select(self.descriptors, [], [], max(0.0, seconds))
        self.poll()

    def ask_to_leave(self, local_rank: int) -> None:
        """Ask a rank to leave its group."""
        self._send(local_rank, leave=True)

    def join(self, local_rank: int, environment: dict[str, str]) -> None:
        """Have a rank that has left its group join the one that `environment` describes."""
        self.ranks[local_rank].left, self.ranks[local_rank].crowd = None, 0
        self._send(local_rank, join=environment)

    def join_when_ready(self, local_rank: int, pid: int, environment: dict[str, str]) -> None:
        """Have a worker join the group that `environment` describes, now or as soon as it is ready
        for it.
        """
        self.joining[local_rank] = pid, environment
        self.poll()

    def _send(self, local_rank: int, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead, which its exit will show
            self.ranks[local_rank].connection.send(encode_json(message).encode())

    def _forget(self, local_rank: int) -> None:
        rank = self.ranks.pop(local_rank, None)
        if rank is not None:
            rank.connection.close()

    def close(self) -> None:
        """Close all connections."""
        for local_rank in list(self.ranks):
            self._forget(local_rank)
        for connection in (*self._unknown, self._server):
            connection.close()
        self.path.unlink(missing_ok=True)


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; empty at the end of the connection, None if there is none yet."""
    try:
        packet = connection.recv(_MESSAGE_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return {}
    try:
        return parse_object(packet) if packet else {}
    except MalformedTextError:  # no message of ours: the connection ends
        return {}
