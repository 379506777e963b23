"""The fault injector of `kdist drill`: a program that runs next to the agent, in the agent's pod or
on this machine, as `python -c SOURCE ACTION OPTIONS`.

Its own text is sent, so it works with every image that has Python: it imports nothing but the
standard library, and nothing of kdist. It prints one JSON object per line: `refused` with a
reason before anything is hurt, else `struck`, and `over` when a fault that lasts has ended. Such a
fault ends after its time, or as soon as the program's standard input closes: if `kdist drill` is
killed, nothing stays stopped. The end of the input also says that the answer was read: output of a
command that ends at once may be lost on its way from a pod.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_OWNER = struct.Struct("<QQ")  # pid and generation, at the start of a rank's heartbeat file
_ANSWERS = 1  # the file descriptor that `kdist drill` reads
_READ_SECONDS = 5.0  # for the reader to say that it has read
_ROUNDS = 50  # of a search for processes that are just being started


class RefusedError(Exception):
    """The fault is refused; nothing was hurt."""


def refuse(reason: str) -> NoReturn:
    """End before anything is hurt."""
    raise RefusedError(reason)


def answer(**fields: object) -> None:
    """Answer with one line, written at once. The reader may have gone."""
    with contextlib.suppress(OSError):
        os.write(_ANSWERS, json.dumps(fields, allow_nan=False).encode() + b"\n")


def find_tree(root: int) -> list[int]:
    """The process `root` and all that it has started; empty if it does not run."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                alive.add(int(entry.name))
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root] if root in alive else []
    for pid in found:  # grows during the loop
        found.extend(child for child in children.get(pid, ()) if child in alive)
    return [pid for pid in found if pid != os.getpid()]


def find_rank(scratch: Path, local_rank: int, agent: int) -> int | None:
    """The process of a rank: by its heartbeat file, else by the environment that it was started
    with. None if the agent has no such process.
    """
    below = find_tree(agent)[1:]
    with contextlib.suppress(OSError, struct.error):
        pid, _ = _OWNER.unpack_from((scratch / f"rank-{local_rank}.heartbeat").read_bytes())
        if pid in below:
            return int(pid)
    for pid in below:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"LOCAL_RANK={local_rank}".encode() in variables:
                return pid
    return None


def send(number: signal.Signals, pids: list[int]) -> list[int]:
    """Send a signal; returns those that received it."""
    reached = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def check_agent(agent: int) -> None:
    """Refuse what cannot reach the agent."""
    if agent not in find_tree(agent):
        refuse(f"the agent (pid {agent}) does not run")


def kill_rank(arguments: argparse.Namespace) -> None:
    """Kill one rank, nothing else."""
    check_agent(arguments.agent)
    pid = find_rank(arguments.scratch, arguments.local_rank, arguments.agent)
    if pid is None:
        refuse(f"no process of local rank {arguments.local_rank} was found")
    if not send(signal.SIGKILL, [pid]):
        refuse(f"process {pid} of the rank cannot be killed: it has ended or is another user's")
    answer(state="struck", pids=[pid])


def kill_agent(arguments: argparse.Namespace) -> None:
    """Kill the agent; its ranks notice and end. A container ends with its agent, so the answer is
    sent and read before.
    """
    check_agent(arguments.agent)
    answer(state="struck", pids=[arguments.agent])
    wait(_READ_SECONDS)
    send(signal.SIGKILL, [arguments.agent])


def kill_node(arguments: argparse.Namespace) -> None:
    """Kill the agent together with its ranks and all that they have started."""
    check_agent(arguments.agent)
    answer(state="struck", pids=send(signal.SIGKILL, find_tree(arguments.agent)))


def silence(arguments: argparse.Namespace) -> None:
    """Stop all processes of the node for a while: connections stay open, nothing answers."""
    check_agent(arguments.agent)
    stopped: list[int] = []
    try:
        for _ in range(_ROUNDS):
            fresh = [pid for pid in find_tree(arguments.agent) if pid not in stopped]
            if not fresh:
                break
            stopped += fresh
            send(signal.SIGSTOP, fresh)
        answer(state="struck", pids=stopped)
        wait(arguments.seconds)
    finally:
        send(signal.SIGCONT, [*stopped, *find_tree(arguments.agent)])
    answer(state="over")


def wake(arguments: argparse.Namespace) -> None:
    """Continue all processes of the node."""
    answer(state="over", pids=send(signal.SIGCONT, find_tree(arguments.agent)))


def wait(seconds: float) -> None:
    """Wait for so long, or until the standard input ends."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and not os.read(sys.stdin.fileno(), 1024):
            return


ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "kill-rank": kill_rank,
    "kill-agent": kill_agent,
    "kill-node": kill_node,
    "silence": silence,
    "wake": wake,
}


def interrupt(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - a handler's signature
    """End by an exception, so that what is stopped is continued."""
    sys.exit(128 + number)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=sorted(ACTIONS))
    parser.add_argument("--agent", type=int, default=0)
    parser.add_argument("--local-rank", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        ACTIONS[arguments.action](arguments)
    except RefusedError as error:
        answer(state="refused", reason=str(error))
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or arguments.action}"
        answer(state="refused", reason=reason)
    wait(_READ_SECONDS)


if __name__ == "__main__":
    main()
