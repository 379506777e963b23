"""The training loop: `train` runs a training from its first step to its last, and `step` is one
optimizer step.

`warm_up` runs two backward passes before the first step and discards their gradients, so that DDP's
gradient buckets no longer change afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kdist_trainer import log
from kdist_trainer.config import Fate
from kdist_trainer.instrumentation.device_stats import was_counting
from kdist_trainer.liveness import Phase
from kdist_trainer.metrics.step_stats import StepPhase, Wall
from kdist_trainer.rng import WEIGHTS, derive, generators_of
from kdist_trainer.training.checkpointing import TrainState
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.evaluation import gets_no_better, measure
from kdist_trainer.training.forward_backward import UNWATCHED, run_stages
from kdist_trainer.training.interval_sync import (
    flush_pending_losses,
    raise_nonfinite,
    sync_ranks,
)
from kdist_trainer.training.loss_check import check_loss, refuse_mean, split
from kdist_trainer.training.profiler import start_profile as begin_profile
from kdist_trainer.training.sync import StepRecord


def warm_up(run: TrainContext) -> None:
    """Run two backward passes and discard their gradients, so that DDP's buckets no longer change.

    DDP reorders its buckets after the first backward pass. With three or more ranks another order
    of sums changes the result in the last bits: a resumed training would differ from an
    uninterrupted one in its first step. So every generation begins with this.
    """
    run.beat(Phase.INIT, run.state.step)
    piece = run.loader.sample()
    run.set_generators(derive(run.state.seed, WEIGHTS))

    def backward(counting: AbstractContextManager[None] | None = None) -> None:
        if run.settings.strategy == "pipeline":
            run_stages(run, [piece], 1.0, UNWATCHED)
            return
        with run.precision.autocast(), counting or nullcontext():
            loss, count = split(run.workload, run.workload.loss(run.model, piece.batch))
        check_loss(run.workload, loss, count, piece.samples)
        loss.backward()  # type: ignore[no-untyped-call]

    with run.buffers.observed():
        try:
            backward(run.resources.counting(piece.samples))
        except Exception as error:
            if not was_counting(error):
                raise
            backward()
        drawing = generators_of(backward, run.world.device)
        if run.world.generation == 1:
            everywhere: Callable[[bool], bool] = (
                partial(holds_everywhere, run) if run.strategy.sharded else bool
            )
            refuse_mean(run.workload, run.module, piece.batch, piece.samples, everywhere=everywhere)
            run.strategy.let_go()
    if ":" not in run.settings.workload:  # of a user's loss nobody knows what it draws from later
        run.set_generators = drawing
    run.optimizer.zero_grad()


def holds_everywhere(run: TrainContext, own: bool) -> bool:
    """Whether `own` is true on all ranks. Collective."""
    return all(run.world.all_gather_object(own))


def train(run: TrainContext) -> str:
    """Train to the last step, or until a rank is asked to stop; returns "done" or "stopped".
    Collective.

    Raises `NonFiniteError` if the loss is not finite and the job asks to stop then, `StorageError`
    if a required save fails, and whatever the user's code raises.
    """
    setup(run)
    while run.state.step < run.target:
        if not step(run):
            rollback(run)
        if run.state.step < run.boundary:
            continue
        said = sync_ranks(run)
        if said.stop:
            break
        if said.profile:
            begin_profile(run)
        if run.probe.is_due(said.step_seconds * len(said.records)):
            probe(run, Wall.IDLE)
        if run.evaluates_at(run.state.step) and gets_no_better(run):
            run.target = run.state.step
        elif said.save or run.saves.due(run.state.step):
            save(run)
    outcome = finish(run) if run.state.step >= run.target else stop(run)
    run.timer.close()
    run.curves.close()
    run.saves.close()
    return outcome


def setup(run: TrainContext) -> None:
    """Warm up, restore the newest checkpoint or load the pretrained weights, and open the batches
    at that position.
    """
    warm_up(run)
    run.stats.add_wall(Wall.INIT, run.laps.skip())
    run.beat(Phase.RESTORE, run.state.step)
    saved = run.saves.restore()
    if saved is None and run.pretrained is not None:
        run.pretrained.load()
    run.stats.add_wall(Wall.CHECKPOINT_RESTORE, run.laps.skip())
    if run.world.is_leader:
        log_resume(run, saved)
    probe(run, Wall.INIT)
    seek_data(run)
    catch_up(run)
    if run.state.step < run.target:
        run.saves.reopen()


def catch_up(run: TrainContext) -> None:
    """Run the evaluation that was skipped when the run was stopped at this step, since the grace
    period is for saving.
    """
    if (
        run.evaluates_at(run.state.step)
        and run.state.evaluated != run.state.step
        and gets_no_better(run)
    ):
        run.target = run.state.step


def probe(run: TrainContext, category: Wall) -> None:
    """Measure the bandwidth between the ranks; the time is not part of a step."""
    run.probe.measure()
    run.stats.add_wall(category, run.laps.skip())


def seek_data(run: TrainContext) -> None:
    """Open the batches at the current position, and set the learning rate and the last step of the
    run.
    """
    state = run.state
    run.target = run.stats.target_steps = run.loader.go_on(
        step=state.step, position=state.samples_seen
    )
    if run.curve is not None:
        run.curve.place(state.step, steps=run.target)
    run.buffers.begin()
    run.first_step = run.boundary = run.state.step + 1
    run.curves.begin(run.state.step)
    run.batches = run.loader.batches(step=run.state.step, position=run.state.samples_seen)


def log_resume(run: TrainContext, saved: TrainState | None) -> None:
    """Log where the run continues, and whether its results will be bitwise those of an
    uninterrupted run.
    """
    if saved is None:
        log.event("training-started", step=0)
        return
    log.event(
        "resumed",
        step=saved.step,
        samples_seen=saved.samples_seen,
        checkpoint=run.saves.resumed_from,
    )
    edits = [change for change in run.saves.changes if change.fate is not Fate.FREE]
    if edits:
        log.warn(
            "job-edited",
            fields=[change.field for change in edits],
            message="; ".join(map(str, edits)),
        )
    if asked := run.loader.past_end(step=saved.step, position=saved.samples_seen):
        done = (
            f"the checkpoint is of step {saved.step}, after {saved.samples_seen} samples, and "
            f"the job asks for {asked}"
        )
        way = "the run ends at this step; a larger value goes on from it, and --fresh begins anew"
        log.warn(
            "past-end",
            step=saved.step,
            samples_seen=saved.samples_seen,
            asked=asked,
            message=f"{done}: {way}",
        )
    before, now = saved.describe_writer(), run.state.describe_writer()
    if before != now:
        why = f"saved by {before}; resumed by {now}"
        log.event(
            "not-reproducible",
            why=why,
            message=f"the training goes on correctly, but not equal to the bit: {why}",
        )


def step(run: TrainContext) -> bool:
    """One optimizer step over the next `globalBatch` samples of the stream; False if the training
    must roll back.
    """
    run.beat(Phase.STEP, run.state.step + 1)
    lap = run.laps.lap
    lap(StepPhase.OTHER)
    batch = next(run.batches)
    lap(StepPhase.DATA_WAIT)

    # Every forward pass adds its share of the step's mean loss: a sum over samples, divided by the
    # count of the whole step.
    scale = run.weigh(batch)
    run.optimizer.zero_grad()
    run.timer.start()
    run.losses.append(run.learn(run, batch.pieces, scale))
    run.timer.settle()

    run.norm = run.precision.update(run.optimizer, run.admit)
    if run.must_go_back:
        return False
    run.after_update()
    run.move_rate()
    lap(StepPhase.OPTIMIZER)
    if run.precision.left_out:
        run.buffers.put_back()  # on all ranks: the gradient's norm is the same there
    elif run.buffers.agree():
        lap(StepPhase.COMM_EXPOSED)

    state, seconds = run.state, run.laps.end()
    state.step += 1
    run.records.append(
        StepRecord(state.step, state.samples_seen, state.samples_seen + batch.samples - 1, seconds)
    )
    state.samples_seen += batch.samples
    run.stats.add_step(seconds, batch.own_samples * run.strategy.counts, state.step)
    run.report()
    return True


def rollback(run: TrainContext) -> None:
    """Restore the newest checkpoint, and skip the refused update when its step comes again. Raises
    `NonFiniteError`.
    """
    assert run.guard is not None  # noqa: S101 - only a guard refuses
    refused = run.state.step + 1
    run.losses.pop()
    flush_pending_losses(run)
    run.must_go_back = False
    run.saves.restore()
    run.stats.add_wall(Wall.CHECKPOINT_RESTORE, run.laps.skip())
    if not run.guard.ban(refused, since=run.state.step):
        raise_nonfinite(
            run, f"step {refused} is refused like the ones before that the training went back for"
        )
    if run.world.is_leader:
        log.warn(
            "rolled-back",
            step=run.state.step,
            refused=refused,
            message=f"back to step {run.state.step}: {refused} is refused",
        )
    run.saves.diary.add_event("rolled_back", step=run.state.step, refused=refused)
    seek_data(run)
    catch_up(run)


def save(run: TrainContext, *, required: bool = False, done: dict[str, Any] | None = None) -> None:
    """Save the state of this step."""
    flush_pending_losses(run)
    run.beat(Phase.SAVE, run.state.step)
    run.saves.save(required=required, done=done)
    run.stats.add_wall(Wall.CHECKPOINT_SAVE, run.laps.skip())


def stop(run: TrainContext) -> str:
    """Save the state of this step after a request to stop."""
    save(run, required=True)
    if run.world.is_leader:
        log.event("stopped", step=run.state.step)
    run.saves.diary.add_event("stopped", step=run.state.step)
    return "stopped"


def finish(run: TrainContext) -> str:
    """Evaluate the model, and save the final state of the run."""
    flush_pending_losses(run)
    metrics = measure(run) if run.settings.evaluate == "end" else {}
    done = {
        "step": run.state.step,
        "samples_seen": run.state.samples_seen,
        "outcome": "done",
        "metrics": metrics,
        "weights": digest(run),
    }
    save(run, done=done)
    run.saves.diary.add_event("done", **done)
    if run.world.is_leader:
        log.event("done", **done)
    return "done"


def digest(run: TrainContext, most_bytes: int = 2**28) -> str | None:
    """SHA-256 of all parameters and buffers in the order of their names; None for a model too large
    to hash quickly.

    Collective if the model is sharded.
    """
    held = sum(
        value.nbytes for value in run.module.state_dict().values() if isinstance(value, Tensor)
    )
    if (max(run.world.all_gather_object(held)) if run.strategy.sharded else held) > most_bytes:
        return None
    state = {
        name: value for name, value in run.strategy.weights().items() if isinstance(value, Tensor)
    }
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode())
        sha.update(state[name].contiguous().flatten().view(torch.uint8).numpy().data)
    own = sha.hexdigest()
    return str(run.world.broadcast_object(own)) if run.strategy.sharded else own
