"""Reports the agent's state and events, to the log and to the metrics exporter, and which of the
folders that a training writes to are full.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kdist_trainer import log
from kdist_trainer.agent.coordination import FAILURE, START, Generation
from kdist_trainer.agent.restart_policy import RULE
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.metrics.status import RunHistory
from kdist_trainer.processes.signals import signal_name
from kdist_trainer.processes.threads import BoundedCalls

if TYPE_CHECKING:
    from kdist_trainer.agent.coordination import AgentStore
    from kdist_trainer.agent.logs import LogRelay
    from kdist_trainer.config import TrainConfig
    from kdist_trainer.metrics.exporter import Exporter
    from kdist_trainer.rendezvous.handler import Rendezvous


SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - its room is looked at, nothing is written
_LITTLE_BYTES: Final = 1 << 20
_LITTLE_SHARE: Final = 0.01
_ANSWER_SECONDS: Final = 1.0
_calls: dict[Path, BoundedCalls] = {}
_asking = threading.Lock()
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")

ADVICE: Final[Mapping[str, str]] = {
    "checkpoints": "delete old checkpoints or other files there, keep fewer "
    "(spec.train.checkpoint.keep), or use a larger volume",
    "scratch": "delete other files there, it is the folder of this agent's own files",
    "shared memory": "lower train.loader.workers, or raise spec.resources.memory, of which "
    "/dev/shm is a part",
}
"""What helps, by the use of the folder."""


def describe_full(folders: Iterable[tuple[str, object]], *, has: str = "has") -> str:
    """A sentence that names each folder without room and what helps; empty if all have room.

    Args:
        folders: The use of each, a key of `ADVICE`, and the folder. What is no folder of this
            machine, such as one of an object store, is left out.
        has: `had` in a text that is read later.
    """
    return "; ".join(filter(None, (_describe(use, folder, has=has) for use, folder in folders)))


def describe_room(use: str, folder: object) -> str:
    """A sentence about the room of a folder and what makes more; empty for one that is none."""
    return _describe(use, folder, however=True)


def _describe(use: str, folder: object, *, however: bool = False, has: str = "has") -> str:
    """The sentence if the folder is full, or `however` full it is."""
    if not isinstance(folder, Path):
        return ""
    try:
        found = _ask(folder)
    except TimeoutError:
        return f"storage: {folder} ({use}) does not answer: look at its disk or its server"
    except FileNotFoundError:
        if folder == SHARED_MEMORY:
            return ""
        return f"storage: {folder} ({use}) does not exist: it was removed, or is not mounted"
    except OSError:
        return ""
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    no_files = found.f_files > 0 and found.f_favail == 0
    if total == 0 or not (however or no_files or free < min(_LITTLE_BYTES, _LITTLE_SHARE * total)):
        return ""
    left = "no room for another file" if no_files else f"{_show(free)} free of {_show(total)}"
    return f"storage: {folder} ({use}) {has} {left}: {ADVICE[use]}"


def _ask(folder: Path) -> os.statvfs_result:
    """The room of a folder. Raises `OSError`, and `TimeoutError` if it does not answer soon."""
    with _asking:
        if folder not in _calls:
            _calls[folder] = BoundedCalls(str(folder), seconds=_ANSWER_SECONDS)
        return _calls[folder].call(lambda: os.statvfs(folder))


def _show(amount: float) -> str:
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


SEPARATE: Final = (
    "none of the ranks has formed a process group with the others: unless they exchange by other "
    "means than torch.distributed, each has trained a model of its own"
)
_SHOWN = 500  # characters of a message that `/status` shows


def _read_history(generation: Generation) -> RunHistory:
    return RunHistory(
        generation.total_restarts or 0,
        generation.total_lost_steps or 0,
        generation.committed_step,
        generation.committed_at,
    )


class AgentTelemetry:
    """Reports each event to the log and the exporter.

    Args:
        exporter: Serves the agent's metrics and status.
        relay: The relay of the workers' output, which prefixes lines with ranks.
        max_restarts: The job's limit of restarts without progress, if it may restart.
        managed: Whether the workers run a managed training, not a script.
        folders: The folders that the training writes to, each with its use.
    """

    def __init__(
        self,
        exporter: Exporter,
        relay: LogRelay,
        *,
        max_restarts: int,
        managed: bool = True,
        folders: Sequence[tuple[str, object]] = (),
    ) -> None:
        self._exporter = exporter
        self._relay = relay
        self._max_restarts = max_restarts
        self._single_start = False
        self._managed = managed
        self._folders = folders
        self.devices = ""
        """What the ranks of this node run on."""
        exporter.sources.room, exporter.sources.full = self._find_room, self.find_full
        self._world_size = 1
        self._waiting_since: float | None = time.monotonic()

    def state(self, state: str) -> None:
        """Set the state of the agent, which `/status` shows."""
        self._exporter.set_state(state)

    def show_job(self, config: TrainConfig, *, procs: int) -> None:
        """Show what the ranks of this node, `procs` in number, run on, and whether they may restart
        before one has opened the job's checkpoints.
        """
        from kdist_trainer.distributed import devices  # which imports torch

        self.devices = devices.describe_devices(procs, config.train)
        self._single_start = config.starts_once

    def show_rendezvous(self, handler: Rendezvous, store: AgentStore) -> None:
        """Have `/status` and the metrics show the other agents, the connections that the exchange
        has closed, whether and how the API server refuses this agent the rendezvous, and whether
        the key of the exchange is mounted.
        """

        def read() -> dict[str, Any] | None:
            known = handler.peers()
            if known is None:
                return None
            return {
                "heard": sorted(known.heard),
                "silent": sorted(known.silent),
                "age_seconds": round(time.monotonic() - known.read_at, 3),
            }

        self._exporter.sources.peers = read

        sources = self._exporter.sources
        sources.refused, sources.is_refused = handler.refused, store.is_refused
        sources.refusal = store.refusal
        sources.has_key = handler.has_key

    def show_activity(self, activity: Callable[[], Mapping[int, Mapping[str, Any]]]) -> None:
        """Have `/status` show what the ranks of a new group do."""
        self._exporter.sources.activity = activity

    @contextmanager
    def waiting_for(self, message: str) -> Iterator[None]:
        """Have `/status` show what the agent waits for, as long as it does."""
        self._exporter.sources.waiting_for = message
        try:
            yield
        finally:
            self._exporter.sources.waiting_for = ""

    def rendezvous_started(self) -> None:
        """The agent joins the next rendezvous round."""
        self._waiting_since = time.monotonic()
        self.state("rendezvous")
        log.event("rendezvous-started")

    def rendezvous_ended(self, outcome: str) -> None:
        """Count a rendezvous by its outcome: `formed`, `timeout` or `failed`."""
        if self._waiting_since is not None:
            self._exporter.observe_rendezvous(time.monotonic() - self._waiting_since, outcome)

    def node_stands_by(self) -> None:
        """The group has its nodes: this one waits until it is needed, for which no time is
        observed.
        """
        self._waiting_since = None
        self.state("standby")
        log.event("node-standby")

    def rendezvous_completed(
        self,
        generation: Generation,
        *,
        world_size: int,
        ranks: list[int],
        is_group_rank_0: bool,
    ) -> None:
        """A rendezvous round is complete and its workers start.

        Args:
            generation: The generation of the workers.
            world_size: The number of ranks on all nodes.
            ranks: The global ranks of this node, by local rank.
            is_group_rank_0: Whether this agent counts what concerns the whole group.
        """
        self._world_size = world_size
        self.state("initializing")
        self._exporter.sources.devices = self.devices
        self._exporter.sources.slow_start = generation.slow_start
        self._relay.begin(ranks, generation=generation.number)
        self._exporter.run_counts.begin(_read_history(generation))
        self._exporter.set_group(
            generation=generation.number, world_size=world_size, local_ranks=ranks
        )
        self._exporter.at_risk.start_group(generation.at_risk_seconds, has_rank_zero=0 in ranks)
        if not self._single_start:
            self._show_remaining(generation)
        elif is_group_rank_0 and not generation.from_step and generation.reason == START:
            log.event("restarts-off", message=RULE)
        if is_group_rank_0 and generation.lost_steps:
            self._exporter.add_lost_steps(generation.lost_steps)
        log.bind(generation=generation.number)
        if generation.reason == FAILURE:
            fields = {
                "restarts": generation.restarts,
                "budget": self._max_restarts,
                "cause": generation.cause,
                "failure": generation.message[:500],
            }
            if not generation.from_step and not self._managed:
                fields["message"] = (
                    "the script starts again from the beginning: it has saved no checkpoint "
                    "that kdist knows"
                )
            if generation.slow_start:
                fields["message"] = generation.slow_start
            log.warn("restarting", **fields)
        log.event(
            "rendezvous-completed",
            world_size=world_size,
            nodes=len(generation.nodes),
            reason=generation.reason,
            **({"devices": self.devices} if self.devices else {}),
        )

    def checkpoints_opened(self, generation: Generation) -> None:
        """A script has opened the job's checkpoints, so that it may be started again."""
        self._single_start = False
        self._show_remaining(generation)
        log.event("checkpoints-opened", limit=self._max_restarts)

    def _show_remaining(self, generation: Generation) -> None:
        remaining = max(0, self._max_restarts - generation.restarts)
        self._exporter.set_restarts_remaining(remaining, budget=self._max_restarts)

    def rank_started(self, rank: int, pid: int) -> None:
        """A worker process has started."""
        log.event("worker-started", rank=rank, pid=pid)

    def rank_failed(self, failure: Failure, exit_code: int | None) -> None:
        """A worker failed; `exit_code` is None if the agent killed it."""
        name = None if exit_code is None else signal_name(exit_code)
        op = (failure.collective or "").partition("(")[0]
        self._exporter.add_worker_exit(failure.cause, name, collective=op)
        write = log.error if failure.primary else log.warn
        write(
            "worker-failed",
            cause=failure.cause,
            rank=failure.rank,
            step=failure.step,
            signal=name,
            code=exit_code if name is None else None,
            message=failure.message,
            primary=failure.primary,
        )

    def count_separate(self, *, is_known: bool) -> int:
        """The number of ranks that are done and have never formed a process group, which is logged;
        0 if there is one rank only, or if it is not known of this node's.
        """
        if not is_known or self._world_size == 1:
            return 0
        log.warn("separate-ranks", ranks=self._world_size, message=SEPARATE)
        return self._world_size

    def group_ended(self, outcomes: Iterable[str], *, is_kept: bool) -> None:
        """The worker group has ended on this node.

        Args:
            outcomes: Of the workers that succeeded: `done` or `stopped`.
            is_kept: Whether a worker of this node holds the state in memory.
        """
        for outcome in outcomes:
            self._exporter.add_worker_exit(outcome, None)
        self._exporter.at_risk.stop(now=time.time(), is_kept=is_kept)

    def group_failed(self, failure: Failure) -> None:
        """A failure ended the group; whether it restarts is decided later."""
        self.state("restarting")
        self._exporter.add_restart(failure.cause)
        full = self.find_full()
        if full:
            log.error("disk-full", message=full)
        self._exporter.sources.last_failure = {
            "cause": failure.cause.value,
            "message": failure.message[:_SHOWN],
            "rank": failure.rank,
            "node": failure.node,
            "step": failure.step,
            "time": round(failure.time, 3),
            "primary": failure.primary,
            "full": full or None,
        }

    def _find_room(self) -> str:
        return "".join(describe_room(use, each) for use, each in self._folders[:1])

    def find_full(self, *, has: str = "has") -> str:
        """A sentence about the folders without room that the training writes to; empty if all have
        room. With `has="had"` it is for a text that is read later.
        """
        return describe_full(self._folders, has=has)

    def hang(self, failure: Failure, *, phase: str, stacks: str) -> None:
        """A rank hangs in `phase`; `stacks` is the path of its stacks."""
        self.state("hung")
        log.error(
            "hang",
            rank=failure.rank,
            step=failure.step,
            phase=phase,
            collective=failure.collective,
            stacks=stacks,
        )
