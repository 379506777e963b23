"""When the training loop saves and restores, and what it allows to be edited in between.

Besides model and optimizer a checkpoint holds the position in the training (`TrainState`) and small
states such as the loss scaler. `CheckpointManager` does the saving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kdist_trainer import log
from kdist_trainer.checkpoint.checkpointer import CheckpointManager, Waiting
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.interval import INTERVAL_EVENT, SaveClock, make_interval
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex, describe_index
from kdist_trainer.checkpoint.writer import CarriedSave
from kdist_trainer.config import Every
from kdist_trainer.config.edit_rules import Change, compare, explain_refusal
from kdist_trainer.distributed.world import to_local
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Heartbeat, NullHeartbeat, Phase
from kdist_trainer.state import AS_NEW, BufferNames
from kdist_trainer.training.carrying import CarriedNews, Carrier, Carrying
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.training.sync import StopFlag
from kdist_trainer.training.training_state import TrainingState, TrainState
from kdist_trainer.workload import apply_edits


class TrainerCheckpointing:
    """Saves and restores the training's state. Every rank calls the same methods in
    the same order.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        training: TrainingState,
        *,
        every: Every,
        step_log: StepLog,
        stats: StepStats,
        find_edits: Callable[[Mapping[str, Any]], list[Change]] = lambda _: [],
        clock: SaveClock | None = None,
        carried: CarriedSave | None = None,
        stop_flag: StopFlag | None = None,
        heartbeat: Heartbeat | NullHeartbeat | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        """Make the checkpointing of a run; without a manager, for a job without a checkpoint
        folder, nothing is saved.

        `find_edits` returns what was edited since a checkpoint of the given job was written, or
        raises `CheckpointMismatchError`. `carried` is the save that this rank writes alone since a
        former group. Heartbeat and reporter continue while the ranks wait for the storage.
        """
        self.manager = manager
        self.clock = clock or SaveClock(make_interval(every))
        self.training = training
        self.best_at = -1
        """Step of the best evaluation so far, which is due to be saved; -1 if none is."""
        self.committed_step = -1
        """Step of the newest committed checkpoint; -1 if there is none."""
        self.changes: list[Change] = []
        """What was edited in the job since the checkpoint that was restored last."""
        self.carrying = Carrying(self, carried)
        self.step_log = step_log
        self._counted_fallbacks = 0
        self._find_edits = find_edits
        self._job_groups = (
            [dict(group) for group in training.optimizer.param_groups]
            if manager is not None
            else []
        )
        """The optimizer's groups as the job's settings make them, before anything is restored."""
        self._every = every
        self._stats = stats
        self._started_step = -1
        """Step of the newest save that was started."""
        self._heartbeat, self._reporter = heartbeat or NullHeartbeat(), reporter
        self._is_checked = False
        """Whether the state has been proven to be loadable, or was loaded."""
        if manager is not None:
            self.clock.cuts = manager.cuts
            manager.on_result = self._count
            manager.on_open = self._continue_in_folder
            flag = stop_flag or StopFlag()
            manager.required.waiting = Waiting(
                check_group=flag.raise_if_leaving,
                is_asked_to_stop=lambda: flag.requested,
                beat=self._report_waiting,
                pause_seconds=lambda: self.clock.pause_seconds,
            )
            manager.loadable = training.loading.check
            training.loading.observe(training, is_restoring=False)

    def restore(self) -> TrainState | None:
        """Restore the newest checkpoint that passes verification; returns its state, or None, with
        nothing changed, if there is none. Collective. Raises `CheckpointMismatchError` if the job
        was edited so that it cannot continue from it.
        """
        if self.manager is None:
            return None
        training, state = self.training, self.training.state
        if (carried := self.carrying.drop()) is not None:
            self._acknowledge(carried)
        training.loading.observe(training, is_restoring=True)
        tensors: dict[str, Any] = {}
        buffers = AS_NEW

        def make(found: LoadedCheckpoint, index: SavedIndex) -> dict[str, Any]:
            nonlocal tensors, buffers
            saved = found.state.get("extras", {}).get("buffers", {})
            absent, made = (set(saved.get(key, ())) for key in BufferNames._fields)
            names = {one.removeprefix("model.") for one in index}
            buffers = BufferNames(absent, made | training.remove_made(names | absent))
            tensors = training.template(describe_index(index), buffers=buffers)
            return tensors

        found = self.manager.load(make, fingerprint=state.fingerprint, check_job=self._record_edits)
        for fallback in self.manager.fallbacks[self._counted_fallbacks :]:
            self._stats.add_fallback(fallback.cause)
        self._counted_fallbacks = len(self.manager.fallbacks)
        if found is None:
            return None
        training.load(tensors, buffers=buffers)
        self.manager.loadable.accept(training.tensors())
        saved = TrainState.from_json(found)
        edited = {change.field for change in self.changes}
        if any(field.startswith("earlyStop") for field in edited):
            saved.extras.pop("early_stop", None)  # it starts again
        self.continue_from(saved)
        apply_edits(training.optimizer, self._job_groups, edited, training.scheduler)
        self._started_step = saved.step
        self.committed_step = saved.step
        self.clock.restored(saved.step)
        self._stats.add_checkpoint("restore")
        return saved

    def skip_load(self, committed: int) -> None:
        """Continue from a state in memory and not from a checkpoint. `committed` is the step of the
        newest one that the former group knew of, -1 for none.
        """
        if self.manager is None:
            return
        if self.manager.folder.trouble is not None:
            self.committed_step = committed
        elif self.manager.resumed is not None:
            self._started_step = self.committed_step = self.manager.resumed.step

    def _report_waiting(self) -> None:
        """Report that this rank waits for the storage, and what has failed."""
        self._heartbeat.beat(Phase.SAVE, self.training.state.step)
        if self._reporter is not None:
            self._reporter.send()

    def _continue_in_folder(self) -> None:
        """Continue with the folder, which was opened only now, at a save. Collective."""
        assert self.manager is not None  # noqa: S101 - it has the folder
        self.carrying.drop()  # this save is of a later step
        newest = self.manager.resumed
        if newest is not None and newest.step > self.committed_step:
            self.committed_step = newest.step
            if newest.step > self.training.state.step:
                self.clock.restored(newest.step)  # what is not beyond it need not be saved
        self.manager.folder.reopen()

    def continue_saving(self, peers: Sequence[Carrier], *, source: int, is_due: bool) -> None:
        """Continue with the clock that was loaded, and with the save that a rank writes alone.
        `is_due` says whether a save was due on rank `source` when it left the former group.
        """
        # what has become of a save while its rank was in no group
        done = max((one.news for one in peers), key=lambda news: (news.step > 0, abs(news.step)))
        if done.step and (result := done.describe()) is not None:
            self._acknowledge(result)
        manager = self.manager
        trouble = None if manager is None else manager.folder.trouble
        _, carried = self.carrying.find(peers) or (0, None)
        self.clock.follow(self.committed_step, carried=carried if trouble is None else None)
        self.carrying.continue_saving(peers, source=source, is_due=is_due and not done.step)
        if manager is not None and trouble is not None:
            # counted, so that it is seen; the next save is due when it would be otherwise
            manager.folder.describe(self.training.state.step, trouble).add_to(self._stats)

    def continue_from(self, saved: TrainState) -> None:
        """Continue from a state whose tensors are loaded. What the job asks for only now starts
        without one.
        """
        state = self.training.state
        state.step = saved.step
        state.samples_seen = saved.samples_seen
        state.evaluated = saved.evaluated
        for name, part in self.training.extras.items():
            if name in saved.extras:
                part.load_state_dict(saved.extras[name])

    def abandon(self) -> None:
        """End the save in progress, whose connections are cut; not collective. Storage that takes
        long is not waited for.
        """
        self.clock.pause()
        self.carrying.detach()
        if self.manager is None:
            return
        if (result := self.manager.abandon()) is not None:
            self.clock.save_ended(result)
        if self.manager.handed_over is not None:
            self.carrying.take(self.manager.handed_over)

    def _record_edits(self, job: Mapping[str, Any]) -> None:
        self.changes = self._find_edits(job)

    def reopen(self) -> None:
        """Mark the run as continuing, even if it was completed before."""
        if self.manager is not None:
            self.manager.folder.reopen()

    @property
    def resumed_from(self) -> str | None:
        resumed = self.manager.resumed if self.manager is not None else None
        return resumed.name if resumed is not None else None

    def next_due(self, step: int) -> int | None:
        """The next step after `step` that the save interval in steps selects."""
        every = self._every.steps
        return None if self.manager is None or every is None else (step // every + 1) * every

    def is_due(self, step: int) -> bool:
        return step == self.best_at or self.next_due(step - 1) == step

    def is_best_unsaved(self) -> bool:
        """Whether the best evaluation is of a state that no checkpoint has or is about to have."""
        return self.best_at > max(self.committed_step, self.carrying.step or -1)

    def is_due_by_clock(self, *, answered_after_steps: int = 0) -> bool:
        """Whether a save is due by this rank's clock, if the ranks act on the answer after that
        number of steps; rank 0's clock decides.
        """
        seconds = answered_after_steps * (self._stats.step_ewma or 0.0)
        step = self.training.state.step
        if self.manager is None:
            return False
        # what had stopped answering is used while it answers
        return self.clock.is_due(step, answered_after=seconds) or self.manager.folder.has_answered

    def save(self, *, required: bool = False, done: Mapping[str, Any] | None = None) -> None:
        """Save the current state; a failure is counted and training continues. `required` says
        whether it must be committed on return, and `done` is the document that records the end of
        the run, if this is its final state. Raises `StorageError` if one of them is given and a
        second attempt failed too. Collective.
        """
        if self.manager is None:
            return
        training, state = self.training, self.training.state
        if done is None and state.step < self.committed_step:
            return  # these ranks had no folder when they continued, and others are ahead
        is_last = required or done is not None
        if is_last and self.carrying.step == state.step and (result := self.carrying.drop()):
            self._acknowledge(result)
            if done is None:
                return
        if required and self._started_step == state.step:
            self.manager.wait()
            if self.committed_step == state.step:
                return
        self._started_step = state.step
        self.clock.save_started(state.step)
        self._read_extras()
        self.step_log.flush()
        started = self.manager.save(
            training.tensors(),
            state.to_json(),
            step=state.step,
            before_commit=self.step_log.sync,
            required=required,
            final=None if done is None else dict(done),
            blocking=self.clock.must_block,
        )
        self.clock.save_stalled(started.visible_seconds)

    def carry(self) -> CarriedSave:
        """Begin a save of the current state that this rank writes alone. Not collective."""
        assert self.manager is not None  # noqa: S101 - who carries has a folder
        self._read_extras()
        state = self.training.state
        return self.manager.carry(self.training.tensors(), state.to_json(), step=state.step)

    def take_news(self, news: CarriedNews) -> None:
        """Handle what the rank that writes a save alone has posted; on all ranks at once."""
        if (result := self.carrying.take_news(news)) is not None:
            self._acknowledge(result)

    def _acknowledge(self, result: SaveResult) -> None:
        """Record the outcome of a save that one rank has written alone. All ranks may have
        saved a later step meanwhile, which counts.
        """
        if result.ok and result.step >= self.committed_step and self.manager is not None:
            self.manager.acknowledge(result)
        self._count(result)

    def _read_extras(self) -> None:
        training = self.training
        training.state.extras = {name: one.state_dict() for name, one in training.extras.items()}

    def wait_for_pending(self) -> None:
        """Wait for the save in progress; afterwards every rank knows the same checkpoints."""
        if self.manager is not None:
            self.manager.wait()

    def poll(self) -> None:
        """Count a save that has completed, and update the metric of the save interval. Called for
        the first time, prove that the state can be loaded. Raises `UnloadableStateError` if it
        cannot.
        """
        if self.manager is not None:
            if not self._is_checked:  # after the first step, so that the optimizer has its state
                self._is_checked = True
                self.manager.loadable.check(self.training.tensors())
            self.manager.poll()
            self._stats.checkpoint_interval = self.interval_seconds()
            if self.training.world.is_rank_zero and (change := self.clock.take_change()):
                log.event("save-interval", **change)
                self.step_log.add_event(INTERVAL_EVENT, **change)

    def interval_seconds(self) -> float | None:
        """Time between two saves; None while the duration of a step is unknown."""
        seconds, steps = self.clock.interval_seconds, self._every.steps
        step_seconds = self._stats.step_ewma
        by_steps = None if steps is None or step_seconds is None else steps * step_seconds
        return min((each for each in (seconds, by_steps) if each is not None), default=None)

    def close(self) -> None:
        if self.manager is not None:
            self.carrying.drop()
            self.manager.close()

    def weights_are_finite(self) -> bool:
        """Whether no weight is NaN or infinite, so that the state is worth saving. Collective if
        sharded.
        """
        weights = [
            to_local(weight)
            for weight in self.training.module.parameters()
            if weight.is_floating_point()
        ]
        filled = [weight for weight in weights if weight.numel()]
        # the largest absolute value of all; NaN if there is one
        own = bool(torch.isfinite(nn.utils.get_total_norm(filled, torch.inf)))
        return (
            all(self.training.world.all_gather_object(own))
            if self.training.strategy.sharded
            else own
        )

    def _count(self, result: SaveResult) -> None:
        result.add_to(self._stats)
        self.clock.save_ended(result)
        if result.ok:
            self.committed_step = max(self.committed_step, result.step)
            self.step_log.forget(result.step)


def find_edits(
    settings: dict[str, Any], job: Mapping[str, Any], *, is_stream: bool
) -> list[Change]:
    """The fields that were edited since `job` wrote a checkpoint. Raises `CheckpointMismatchError`
    if a run with `settings`, the present `spec.train`, cannot continue from it.
    """
    changes = compare(job["train"], settings, stream=is_stream) if "train" in job else []
    problem = explain_refusal(changes)
    if problem is not None:
        raise CheckpointMismatchError(problem)
    return changes
