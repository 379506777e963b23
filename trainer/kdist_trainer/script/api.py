"""Checkpoints for a `torch.distributed` script of the user's: `kdist_trainer.Checkpointer`.

    with Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            ...
            checkpointer.maybe_save(step + 1)
            if checkpointer.stop_requested:
                break

Every rank calls the same methods in the same order, after `init_process_group`. Outside kdist
nothing is saved, and one line of the log says so. Buffers, such as running means, are saved from
rank 0, because DDP sends rank 0's to all ranks before each forward pass.
"""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from kdist_trainer import log
from kdist_trainer.checkpoint.checkpointer import CheckpointManager, Waiting
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.interval import INTERVAL_EVENT, SaveClock, make_interval
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.storage import open_location
from kdist_trainer.config import DEFAULT_KEEP, Checkpointing, Every, Keep, TrainConfig
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.errors import ConfigError
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Heartbeat, Phase
from kdist_trainer.processes.signals import StopCounter
from kdist_trainer.script.state import ScriptObjects, ScriptState, StatefulObject

Manager = TypeVar("Manager", bound=CheckpointManager)
_open: list[tuple[int, CheckpointManager]] = []  # the process, and what has its checkpoints open


@dataclass(frozen=True)
class ScriptWorld:
    """A rank of a script."""

    rank: int
    size: int
    generation: int

    @classmethod
    def current(cls) -> ScriptWorld:
        """This rank in the default process group; alone if there is none."""
        generation = int(os.environ.get("KDIST_GENERATION", "1"))
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), generation)
        return cls(0, 1, generation)


def open_manager(kind: type[Manager], config: Checkpointing) -> Manager | None:
    """Lock the job's checkpoint folder.

    Args:
        kind: what manages it.
        config: how often to save, and what to keep.

    Returns:
        None, with a line in the log, outside kdist and in a job without a checkpoint folder.

    Raises:
        ConfigError: this process has the folder open already.
        CheckpointMismatchError: the folder belongs to another run.
        StorageError: the folder cannot be written.
    """
    world = ScriptWorld.current()
    root, run_id = os.environ.get("KDIST_CHECKPOINTS"), os.environ.get("KDIST_RUN_ID")
    if not root or not run_id:
        if world.rank == 0:
            log.warn(
                "checkpoints-off",
                message=("not started by kdist, or without a checkpoint folder: nothing is saved"),
            )
        return None
    if any(process == os.getpid() for process, _ in _open):
        raise ConfigError(
            "this process has the checkpoints of its job open already, and a second Checkpointer "
            "would lock out the first one: give one Checkpointer all modules and optimizers by "
            "name (model={'a': …, 'b': …}, optimizer={'a': …, 'b': …}), or close() the first one"
        )
    # Before the folder is opened, which may fail for a reason that a restart outlasts: the agent
    # ends the job after a failure of a script that does not continue from checkpoints.
    if (heartbeat := Heartbeat.of_process()) is not None:
        heartbeat.mark_checkpoints()
    job: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError):
        job = TrainConfig.read(Path(os.environ["KDIST_CONFIG"])).to_job()
    take_over = "KDIST_TAKE_OVER" in os.environ
    manager = kind(
        open_location(root), world=world, run_id=run_id, config=config, job=job, take_over=take_over
    )
    _open.append((os.getpid(), manager))
    return manager


def close_manager(manager: CheckpointManager) -> None:
    """Close what `open_manager` has opened."""
    manager.close()
    _open[:] = [one for one in _open if one[1] is not manager]


def sign_of_life() -> Callable[[], None]:
    """Return a function that tells the agent that this rank is saving and not hanging. It does
    nothing in a script that sends no heartbeats.
    """
    heartbeat = Heartbeat.of_process()

    def beat() -> None:
        if heartbeat is not None and (last := heartbeat.read()).count:
            heartbeat.beat(Phase.SAVE, last.step)

    return beat


class Checkpointer:
    """Saves and restores all that a training of a script is: modules, optimizers, schedulers and
    scalers, the objects of `stateful`, `state` and `shared_state`, and each rank's generators of
    random numbers.

    SIGTERM sets `stop_requested` on all ranks at the same step, with the state saved; another one
    more than five seconds later ends the process at once. A process has one `Checkpointer` at a
    time.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        scheduler: StatefulObject | Mapping[str, StatefulObject] | None = None,
        scaler: StatefulObject | Mapping[str, StatefulObject] | None = None,
        stateful: Mapping[str, StatefulObject] | None = None,
        every_seconds: int | Literal["auto"] = "auto",
        every_steps: int | None = None,
        mode: Literal["async", "blocking"] = "async",
        keep: int | Mapping[str, int] = DEFAULT_KEEP,
    ) -> None:
        """Lock the job's checkpoint folder, and read `state` and `shared_state` of the newest
        checkpoint in it.

        Args:
            model: the module, which may be wrapped by DDP or `fully_shard`, or several by name.
            optimizer: the optimizer, or several by name.
            scheduler: the learning rate scheduler, if any, or several by name.
            scaler: the `GradScaler`, if any, or several by name.
            stateful: by name, what else has `state_dict` and `load_state_dict`, of each rank its
                own, such as torchdata's `StatefulDataLoader`.
            every_seconds: time between two saves of `maybe_save`; `"auto"` loses the
                least training time, and keeps checkpoints that are at least five minutes apart.
            every_steps: number of steps between two saves of `maybe_save`, in addition.
            mode: `async` writes while the script continues, `blocking` before `save` returns.
            keep: number of checkpoints to keep; or `{"last": 3, "every": 1000}`, which keeps for
                ever the first one at or after each multiple of so many steps too.

        Raises:
            ConfigError: an object cannot be saved, or this process has an open `Checkpointer`.
            CheckpointMismatchError: the folder belongs to another run.
            StorageError: the folder cannot be written.
        """
        self._objects = ScriptObjects(
            model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler
        )
        self._script = ScriptState(self._objects, stateful or {})
        try:
            config = Checkpointing(every=Every.of(every_seconds), mode=mode, keep=Keep.of(keep))
        except ValidationError as error:
            problems = (f"{error.title.lower()}: {each['msg']}" for each in error.errors())
            raise ConfigError("; ".join(problems)) from None
        if config.keep.best is not None:
            raise ConfigError("keep: only a managed training has a best checkpoint")
        manager = open_manager(CheckpointManager, config)
        self._agreement: SaveAgreement | None = None
        reporter = Reporter()
        self._stats = reporter.stats
        self._newest = 0
        self._clock = clock = SaveClock.from_environment(make_interval(config.every))
        if manager is not None:
            self._agreement = agreement = SaveAgreement(manager, clock, reporter, every_steps)
            manager.required.waiting = Waiting(
                is_asked_to_stop=lambda: agreement.requested,
                beat=sign_of_life(),
                pause_seconds=lambda: clock.pause_seconds,
            )
            manager.loadable.prove = self._script.find_problems
            self._newest = self._script.show(manager.peek(), agreement.group)
            agreement.install_handler()
            clock.start()

    @property
    def state(self) -> dict[Any, Any]:
        """This rank's own values: numbers, texts, and dicts, lists and tuples of these. Those of
        the newest checkpoint are here before `resume`.
        """
        return self._script.part.state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        self._script.part.state = dict(values)

    @property
    def shared_state(self) -> dict[Any, Any]:
        """Values that all ranks have in common, of the same kinds; those of rank 0 are saved."""
        return self._script.shared_state

    @shared_state.setter
    def shared_state(self, values: Mapping[Any, Any]) -> None:
        self._script.shared_state = dict(values)

    @property
    def saved_states(self) -> list[dict[Any, Any]]:
        """`state` of every rank of the newest checkpoint, by rank: where the number of ranks has
        changed, a script divides them again.
        """
        return self._script.saved_states

    @property
    def stop_requested(self) -> bool:
        """Whether all ranks have agreed to stop. The state as of the last `maybe_save` is saved."""
        return self._agreement is not None and self._agreement.stopping

    def resume(self) -> int:
        """Restore everything from the newest checkpoint that verifies. The saved numbers of
        optimizers and schedulers win over those of the script; where these were edited, the log
        says so. `Reporter` counts on from the step.

        Returns:
            Its step; 0 if there is none.

        Raises:
            CheckpointMismatchError: it is of another model, or there are checkpoints and none can
                be read.
        """
        if self._agreement is None:
            return 0
        found = self._script.load(self._agreement.manager, self._agreement.group)
        self._newest = found or 0
        self._clock.start()
        self._agreement.restored(found)
        if found is not None:
            self._stats.last_step = found
        return self._newest

    def skips(self, step: int) -> bool:
        """Whether a step was done before the resume. Use it where a loop begins again and skips
        what is done: at the last skipped step the generators of random numbers continue as saved,
        whatever the loader has drawn since `resume`.

            for step, batch in enumerate(loader, 1):
                if checkpointer.skips(step):
                    continue

        Args:
            step: number of the step, counted from 1.
        """
        if step == self._script.resumed_step:
            self.restore_generators()
        return step <= self._script.resumed_step

    def restore_generators(self) -> None:
        """Have the generators of random numbers continue as they were saved, as `resume` and
        `skips` do: for a loop that goes on elsewhere. Nothing happens if nothing was resumed.
        """
        self._script.part.restore_generators()

    def save(self, step: int, *, required: bool = False) -> None:
        """Save now.

        Args:
            step: number of completed steps.
            required: whether to wait and raise `StorageError` on a failure, which otherwise is only
                logged.

        Raises:
            ValueError: the step is before one that is saved.
            UnloadableStateError: a checkpoint cannot hold a value.
        """
        self._save(step, required=required)

    def maybe_save(self, step: int) -> bool:
        """Save if a save is due, or if a stop was requested on any rank. Call it after every step.

        Args:
            step: number of completed steps.

        Returns:
            Whether it saved.

        Raises:
            ValueError: the step is before one that is saved.
            UnloadableStateError: a checkpoint cannot hold a value.
        """
        if self._agreement is None or self._agreement.stopping:
            return False
        self._check_step(step)
        if is_due := self._agreement.is_due(step):
            self._save(step, required=self._agreement.stopping)
        return is_due

    def finish(self, step: int, **outcome: Any) -> None:
        """Save for the last time and mark the run as ended: started again, it does nothing.

        Args:
            step: number of completed steps.
            outcome: values to store with the result, as JSON.
        """
        self._save(step, final={"outcome": "done", **outcome})

    def close(self) -> None:
        """Wait for the save in progress and release the folder; before `destroy_process_group`."""
        if self._agreement is not None:
            close_manager(self._agreement.manager)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def _save(
        self, step: int, *, required: bool = False, final: dict[str, Any] | None = None
    ) -> None:
        if self._agreement is None:
            return
        step = self._check_step(step)
        self._clock.save_started(step)
        tensors, state = self._script.read(step, self._agreement.group)
        first = self._objects.of_rank_zero()
        started = self._agreement.manager.save(
            tensors,
            state,
            step=step,
            required=required,
            final=final,
            first=first,
            blocking=self._clock.must_block,
        )
        self._clock.save_stalled(started.visible_seconds)
        self._newest = step

    def _check_step(self, step: int) -> int:
        """Raises `ValueError` if a checkpoint of a later step exists: it would stay the newest."""
        step = operator.index(step)
        if step < self._newest:
            raise ValueError(
                f"Checkpointer: step {step} comes after step {self._newest}, which is saved: a "
                "resume would continue from that one. Call resume() before the loop and count on "
                "from the step that it returns, over all epochs; or start again with --fresh"
            )
        return step


_AGREE_SECONDS = 0.5
_MAX_CALLS = 1000


class SaveAgreement:
    """Exchanges stop requests, and whether a save is due by rank 0's clock, about twice a second. A
    rank that stops or saves alone would leave the others waiting in their next collective.

    A second request by SIGTERM (`StopCounter`) ends the process at once.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        clock: SaveClock,
        reporter: Reporter,
        every_steps: int | None,
    ) -> None:
        """Agree on nothing yet; `install_handler` has SIGTERM request a stop. The manager's ledger
        receives when the first step was done: it is how long a run has trained.
        """
        self.manager = manager
        self.group = CheckpointGroup(ScriptWorld.current())
        self.stopping = False
        """Whether all ranks have agreed to stop."""
        self._clock = clock
        self._reporter = reporter
        self._every_steps = every_steps
        self._ledger = RunLedger(manager.directory.root)
        self.requested = False
        """Whether this rank was asked to stop."""
        self._calls = 0
        self._agree_at = 1
        self._agreed_calls = 0
        self._agreed_time = time.monotonic()
        self._former: Any = None
        self._terminations = StopCounter()
        manager.on_result = self._report
        reporter.stats.checkpoint_interval = clock.interval_seconds
        clock.cuts = manager.cuts

    def install_handler(self) -> None:
        """Take SIGTERM as a request to stop, also if another handler was installed since. Does
        nothing outside the main thread, which alone may.
        """
        if threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGTERM, self._on_signal)
            if self._former is None:
                self._former = former

    def remove_handler(self) -> None:
        """Give SIGTERM back to the handler that it had before `install_handler`."""
        if self._former is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._former)
            self._former = None

    def restored(self, step: int | None) -> None:
        """Count the restore from the checkpoint of this step, if any, and those passed over."""
        stats = self._reporter.stats
        for fallback in self.manager.fallbacks:
            stats.add_fallback(fallback.cause)
        if step is not None:
            self._clock.restored(step)
            stats.add_checkpoint("restore")

    def is_due(self, step: int) -> bool:
        """Whether to save now, after `step` completed steps, the same on all ranks; called by all
        after every step, until they stop.
        """
        self.manager.poll()
        due = self._every_steps is not None and step % self._every_steps == 0
        due |= self._exchange(step)
        self._reporter.stats.checkpoint_interval = self._clock.interval_seconds
        return due or self.stopping

    def _exchange(self, step: int) -> bool:
        """Exchange requests if it is time to; returns whether a save is due by rank 0's clock."""
        if not self._calls and self.group.is_rank_zero:
            self._record("first_step", step=step, seconds=round(self._clock.trained, 3))
        self._clock.tick()
        self._calls += 1
        if self._calls < self._agree_at:
            return False
        now = time.monotonic()
        seconds_per_call = (now - self._agreed_time) / (self._calls - self._agreed_calls)
        cost = self._clock.interval.cost or 0.0
        due = self._clock.is_due(step)
        answers = self.group.gather((self.requested, due, seconds_per_call, cost))
        self.stopping = any(stop for stop, _, _, _ in answers)
        slowest = max(seconds for _, _, seconds, _ in answers)
        self._clock.interval.take_costs(max(cost for _, _, _, cost in answers))
        if self.group.is_rank_zero and (change := self._clock.take_change()):
            log.event("save-interval", **change)
            self._record(INTERVAL_EVENT, **change)
        self._agreed_time = now
        self._agreed_calls = self._calls
        self._agree_at = self._calls + max(
            1, min(_MAX_CALLS, int(_AGREE_SECONDS / max(slowest, 1e-6)))
        )
        return answers[0][1]

    def _report(self, result: SaveResult) -> None:
        """Send the result of a save to the agent: the script may have no `Reporter` of its own."""
        result.add_to(self._reporter.stats)
        self._clock.save_ended(result)
        self._reporter.flush()

    def _record(self, event: str, **fields: Any) -> None:
        generation = int(os.environ.get("KDIST_GENERATION", "1"))
        try:
            self._ledger.append(event, generation=generation, **fields)
        except OSError as error:
            log.warn("ledger-write-failed", error=str(error))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._terminations.add():
            os._exit(128 + number)
        self.requested = True
