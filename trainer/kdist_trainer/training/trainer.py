"""The training loop: `train` runs a training from its first step to its last, and `train_step` is
one optimizer step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kdist_trainer import log
from kdist_trainer.config.edit_rules import EditEffect
from kdist_trainer.data.loader import MicroBatch
from kdist_trainer.errors import DataError
from kdist_trainer.instrumentation.device_stats import was_counting
from kdist_trainer.metrics.rank_metrics import StepPhase, WallCategory
from kdist_trainer.numerics.rng import WEIGHTS, Generators, derive
from kdist_trainer.parallel.ddp import explain_unused
from kdist_trainer.processes.liveness import Phase
from kdist_trainer.state import Attributes, describe_changed
from kdist_trainer.training import regroup
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.evaluation import (
    EvaluationLeftError,
    MetricMissingError,
    is_evaluation_due,
    measure,
    next_evaluation_step,
    should_stop_early,
)
from kdist_trainer.training.optimizer import clear_gradients
from kdist_trainer.training.sync import (
    StepRecord,
    end_nonfinite,
    flush_pending_losses,
    record_refused_update,
    sync_ranks,
)
from kdist_trainer.training.training_state import TrainState, describe_environment
from kdist_trainer.training.workload_checks import check_end, reject_mean
from kdist_trainer.workload import LrSchedule


def train(ctx: TrainContext) -> str:
    """Train to the last step, or until a rank is asked to stop; returns "done" or "stopped".
    Collective.

    Raises:
        NonFiniteError: If the loss is not finite and the job asks to stop then.
        StorageError: If a required save fails.
    """
    try:
        with explain_unused(ctx.module):
            setup(ctx)
            outcome = run_steps(ctx)
    except EvaluationLeftError:
        outcome = stop(ctx)
    except MetricMissingError:  # on all ranks
        save(ctx, required=True)
        raise
    ctx.collective_timer.close()
    ctx.tensorboard.close()
    ctx.step_log.close()
    ctx.checkpointing.close()
    return outcome


def run_steps(ctx: TrainContext) -> str:
    """Run the steps of a training that is set up; returns "done" or "stopped". Collective. Raises
    `EvaluationLeftError` on all ranks if one was asked to stop during an evaluation.
    """
    ends_at_once = only_saves(ctx)
    while ctx.state.step < ctx.target and not ends_at_once:
        ctx.stop_flag.raise_if_leaving()
        if not train_step(ctx):
            rollback(ctx)
        if ctx.state.step < ctx.next_sync_step:
            continue
        interval = sync_ranks(ctx)
        ctx.next_sync_step = next_sync_step(ctx)
        if interval.stop:
            break
        if ctx.profile_agreed:
            ctx.profile_agreed = False
            ctx.profiler.start(ctx.target)
        if ctx.bandwidth_probe.is_due(interval.step_seconds * len(interval.records)):
            probe_bandwidth(ctx, WallCategory.IDLE)
        if is_evaluation_due(ctx) and should_stop_early(ctx):
            ctx.target = ctx.state.step
        elif interval.save or ctx.checkpointing.is_due(ctx.state.step):
            save(ctx)
        if ctx.stop_agreed:  # it was collected for an evaluation or a save
            break
    return finish(ctx) if ctx.state.step >= ctx.target else stop(ctx)


def next_sync_step(ctx: TrainContext) -> int:
    """The step of the next exchange: the end of the interval, the next save, the next evaluation
    or the last step, whichever comes first.
    """
    step = ctx.state.step
    steps = (
        step + ctx.sync_interval,
        ctx.target,
        ctx.checkpointing.next_due(step),
        next_evaluation_step(ctx, step),
    )
    return min(each for each in steps if each is not None)


def only_saves(ctx: TrainContext) -> bool:
    """Whether this rank is alone and asked to stop; several would have to agree."""
    return ctx.world.size == 1 and ctx.stop_flag.requested


def train_step(ctx: TrainContext) -> bool:
    """Run one optimizer step over the next `globalBatch` samples. Collective. Returns False if the
    update was refused and the training must be rolled back.
    """
    state, step_timer = ctx.state, ctx.step_timer
    ctx.heartbeat.beat(Phase.STEP, state.step + 1)
    step_timer.record_phase(StepPhase.OTHER)
    batch = next(ctx.batches)
    step_timer.record_phase(StepPhase.DATA_WAIT)

    scale = ctx.loss_scale.compute(batch)
    clear_gradients(ctx.optimizer)
    ctx.collective_timer.start()
    ctx.losses.append(ctx.forward_backward.run(batch.micro_batches, scale))
    ctx.collective_timer.finish_step()
    # The last collective of the step: from here on nothing waits for other ranks until the step is
    # finished, so that a rank which loses a peer holds either this step's state or the last one's.
    if ctx.buffers.synchronize():
        step_timer.record_phase(StepPhase.COMM_EXPOSED)

    update = ctx.precision.update(ctx.optimizer, ctx.guard, state.step + 1)
    ctx.grad_norm = update.grad_norm
    if update.skip_reason and record_refused_update(ctx, update.skip_reason):
        return False
    ctx.ema.update()
    learning_rate = ctx.optimizer.param_groups[0]["lr"]  # of this step, not of the next one
    if isinstance(learning_rate, Tensor):
        learning_rate = learning_rate.clone()  # the scheduler changes it in place
    if ctx.lr_scheduler is not None:
        ctx.lr_scheduler.step()
    step_timer.record_phase(StepPhase.OPTIMIZER)
    if update.skipped:
        ctx.buffers.restore()  # on all ranks: the gradient's norm is the same there
    else:
        ctx.buffers.accept()

    seconds = step_timer.finish_step()
    first = state.samples_seen
    state.step += 1
    state.samples_seen += batch.samples
    if state.step == ctx.first_step:
        state.set_writer(ctx.world.size, describe_environment(ctx.settings, ctx.world))
    last = state.samples_seen - 1
    ctx.step_records.append(StepRecord(state.step, first, last, seconds, learning_rate))
    ctx.stats.add_step(seconds, batch.own_samples * ctx.strategy.is_counted, state.step)
    ctx.reporter.send()
    ctx.profiler.after_step()
    return True


def setup(ctx: TrainContext) -> None:
    """Warm up, take over the former group's state, restore the newest checkpoint or load the
    pretrained weights, and open the batches at that position. Collective.
    """
    if ctx.handover.warm_up is None:
        with watch_attributes(ctx):
            warm_up(ctx)
    else:  # continue with what the warm-up of a former group has shown
        known = ctx.handover.warm_up
        ctx.forward_backward.generators = Generators.of(
            ctx.world.device, numpy=known.has_numpy, python=known.has_python
        )
        ctx.device_stats.flops_per_sample = known.flops_per_sample
        ctx.buffers.load_state_dict(known.buffers)
    check_data(ctx)
    ctx.stats.add_wall(WallCategory.INIT, ctx.step_timer.exclude())
    ctx.heartbeat.beat(Phase.RESTORE, ctx.state.step)
    source = ctx.handover.source
    ctx.continues_in_place = source is not None
    saved: TrainState | None
    target: int | None = None
    if source is not None:
        saved, target = regroup.take_over(ctx, source)
    else:
        saved = ctx.checkpointing.restore()
        if saved is None and ctx.pretrained is not None:
            ctx.pretrained.load()
    ctx.stats.add_wall(WallCategory.CHECKPOINT_RESTORE, ctx.step_timer.exclude())
    if only_saves(ctx) and saved is not None:
        ctx.state.set_writer(saved.world_size, saved.environment)
    if ctx.world.is_rank_zero:
        log_resume(ctx, saved)
    if saved is not None:  # until the first step
        ctx.state.set_writer(saved.world_size, saved.environment)
    if source is None:
        probe_bandwidth(ctx, WallCategory.INIT)
    else:
        ctx.bandwidth_probe.postpone()
    seek_data(ctx)
    if target is not None:  # the former group may have decided to stop early
        ctx.target = min(ctx.target, target)
    ctx.is_consistent = True
    run_missed_evaluation(ctx)
    if ctx.state.step < ctx.target:
        ctx.checkpointing.reopen()
        if ctx.checkpointing.is_best_unsaved():  # continued in place
            save(ctx)
    ctx.checkpointing.clock.start()


def check_data(ctx: TrainContext) -> None:
    """Raise `DataError` if ranks have different data sets: each reads its samples by their position
    in one. Collective.
    """
    every = ctx.world.all_gather_object(ctx.state.fingerprint)
    if other := next((rank for rank, found in enumerate(every) if found != every[0]), None):
        raise DataError(
            f"{type(ctx.workload).__name__}.dataset('train'), or its weights() or fingerprint(), "
            f"is not the same on ranks 0 and {other}, so samples would be used twice or never: "
            "give every shuffle a seed, and every rank the same files"
        )


def warm_up(ctx: TrainContext) -> None:
    """Run backward passes and discard their gradients, so that DDP's buckets no longer change and
    it is known which generators the loss draws from. Collective.

    DDP reorders its buckets after the first backward pass. With three or more ranks another order
    of sums changes the result in the last bits: a resumed training would differ from an
    uninterrupted one in its first step. So every worker group starts with this, unless its ranks
    continue in place and one of them knows what its former group has found out.
    """
    ctx.heartbeat.beat(Phase.INIT, ctx.state.step)
    passes, in_place = ctx.forward_backward, ctx.handover.source is not None
    micro_batch = ctx.loader.first_micro_batch()
    passes.generators.seed(derive(ctx.state.seed, WEIGHTS))
    # a state that ranks have kept has buffers that are newer than those of rank 0, if that is new
    with ctx.buffers.detect_changes(sends_values=not in_place) as compare:
        last_pass = partial(first_pass, ctx, micro_batch)
        if not in_place:
            last_pass()
            compare()
            last_pass = partial(passes.warm_up, micro_batch)
        used = Generators.used_by(last_pass, ctx.world.device)
        compare()
        if ctx.world.generation == 1:
            reject_mean(
                ctx.workload,
                ctx.module,
                micro_batch.batch,
                micro_batch.samples,
                on_all_ranks=(lambda own: all(ctx.world.all_gather_object(own)))
                if ctx.strategy.sharded
                else bool,
            )
            ctx.strategy.reshard()
    if ":" not in ctx.settings.workload:  # a user's loss may draw from other generators later
        passes.generators = used
    ctx.optimizer.zero_grad()


def first_pass(ctx: TrainContext, micro_batch: MicroBatch) -> None:
    """Run a pass of the warm-up that counts the operations of the model. Collective."""
    passes = ctx.forward_backward
    try:
        passes.warm_up(micro_batch, ctx.device_stats.counting(micro_batch.samples))
    except Exception as error:
        if not was_counting(error):
            raise
        passes.warm_up(micro_batch)


def probe_bandwidth(ctx: TrainContext, category: WallCategory) -> None:
    """Measure the bandwidth between the ranks; the time is not part of a step. Collective."""
    ctx.bandwidth_probe.measure()
    ctx.stats.add_wall(category, ctx.step_timer.exclude())


def seek_data(ctx: TrainContext) -> None:
    """Open the batches at the current position, and set the learning rate and the last step of the
    run.
    """
    state = ctx.state
    ctx.target = ctx.loader.steps.resume_at(step=state.step, position=state.samples_seen)
    ctx.stats.target_steps = ctx.target
    if isinstance(ctx.lr_scheduler, LrSchedule):
        ctx.lr_scheduler.seek(state.step, steps=ctx.target)
    elif ctx.lr_scheduler is not None:  # the position of a user's own is part of its saved state
        check_end(ctx.lr_scheduler, steps=ctx.target)
    ctx.buffers.track_constants()
    ctx.first_step = state.step + 1
    ctx.next_sync_step = state.step + 1
    ctx.tensorboard.begin(state.step)
    ctx.batches = ctx.loader.batches(step=state.step, position=state.samples_seen)


def run_missed_evaluation(ctx: TrainContext) -> None:
    """Run the evaluation that was skipped when the run was stopped at this step, since the grace
    period is for saving. Collective.
    """
    if is_evaluation_due(ctx) and ctx.state.evaluated != ctx.state.step and should_stop_early(ctx):
        ctx.target = ctx.state.step


def rollback(ctx: TrainContext) -> None:
    """Restore the newest checkpoint, and skip the refused update when its step comes again.
    Collective. Raises `NonFiniteError` if the training was rolled back to the same checkpoint too
    often.
    """
    refused = ctx.state.step + 1
    ctx.losses.pop()
    flush_pending_losses(ctx, check_weights=False)
    ctx.is_consistent = False
    ctx.checkpointing.restore()
    ctx.is_consistent = True
    ctx.stats.add_wall(WallCategory.CHECKPOINT_RESTORE, ctx.step_timer.exclude())
    if not ctx.guard.skip_step(refused, checkpoint_step=ctx.state.step):
        end_nonfinite(
            ctx,
            f"the update of step {refused} is refused, as were those that caused the rollbacks "
            "before",
        )
    if ctx.world.is_rank_zero:
        log.warn(
            "rolled-back",
            step=ctx.state.step,
            refused=refused,
            message=f"rolled back to step {ctx.state.step}: the update of step {refused} is "
            "refused",
        )
    ctx.step_log.add_event("rolled_back", step=ctx.state.step, refused=refused)
    seek_data(ctx)
    run_missed_evaluation(ctx)


def save(ctx: TrainContext, *, required: bool = False, done: dict[str, Any] | None = None) -> None:
    """Save the state of this step; see `TrainerCheckpointing.save`. Collective."""
    flush_pending_losses(ctx)
    ctx.heartbeat.beat(Phase.SAVE, ctx.state.step)
    ctx.checkpointing.save(required=required, done=done)
    ctx.stats.add_wall(WallCategory.CHECKPOINT_SAVE, ctx.step_timer.exclude())


def stop(ctx: TrainContext) -> str:
    """Save the state of this step after a request to stop; returns "stopped". Collective."""
    save(ctx, required=True)
    if ctx.world.is_rank_zero:
        log.event("stopped", step=ctx.state.step)
    ctx.step_log.add_event("stopped", step=ctx.state.step)
    return "stopped"


def finish(ctx: TrainContext) -> str:
    """Evaluate the model, and save the final state of the run; returns "done". Collective."""
    flush_pending_losses(ctx)
    metrics = measure(ctx) if ctx.settings.evaluate == "end" else {}
    done = {
        "step": ctx.state.step,
        "samples_seen": ctx.state.samples_seen,
        "outcome": "done",
        "metrics": metrics,
        "weights": hash_weights(ctx),
    }
    save(ctx, done=done)
    ctx.step_log.add_event("done", **done)
    if ctx.world.is_rank_zero:
        log.event("done", **done)
    return "done"


_MAX_HASHED_BYTES = 2**28


def hash_weights(ctx: TrainContext) -> str | None:
    """SHA-256 of all parameters and buffers in the order of their names, in hexadecimal; None for a
    model of more than `_MAX_HASHED_BYTES`, which would take too long. Collective if the model is
    sharded.
    """
    held = sum(
        value.nbytes for value in ctx.module.state_dict().values() if isinstance(value, Tensor)
    )
    sizes = ctx.world.all_gather_object(held) if ctx.strategy.sharded else [held]
    if max(sizes) > _MAX_HASHED_BYTES:
        return None
    weights = ctx.strategy.full_state_dict()
    state = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode())
        sha.update(state[name].contiguous().flatten().view(torch.uint8).numpy().data)
    own = sha.hexdigest()
    return str(ctx.world.broadcast_object(own)) if ctx.strategy.sharded else own


def log_resume(ctx: TrainContext, saved: TrainState | None) -> None:
    """Log where the run continues, and whether its results will be bitwise identical to those of an
    uninterrupted run.
    """
    if saved is None:
        log.event("training-started", step=0)
        return
    if ctx.handover.source is None:
        log.event(
            "resumed",
            step=saved.step,
            samples_seen=saved.samples_seen,
            checkpoint=ctx.checkpointing.resumed_from,
        )
    edits = [change for change in ctx.checkpointing.changes if change.effect is not EditEffect.FREE]
    if edits:
        log.warn(
            "job-edited",
            fields=[change.field for change in edits],
            message="; ".join(map(str, edits)),
        )
    if asked := ctx.loader.steps.past_end(step=saved.step, position=saved.samples_seen):
        log.warn(
            "past-end",
            step=saved.step,
            samples_seen=saved.samples_seen,
            asked=asked,
            message=f"the checkpoint is of step {saved.step}, after {saved.samples_seen} samples, "
            f"and the job asks for {asked}: the run ends at this step; set a larger value to "
            "continue it, or start again with --fresh",
        )
    before, now = saved.describe_writer(), ctx.state.describe_writer()
    reasons = [f"saved by {before}; resumed by {now}"] if before != now else []
    lost = ctx.buffers.moving_unsaved() if ctx.handover.source is None else []
    if lost:
        reasons.append(
            f"{len(lost)} buffers of the model ({lost[0]}) are not persistent and begin again"
        )
    if reasons:
        log.not_reproducible("; ".join(reasons))


@contextmanager
def watch_attributes(ctx: TrainContext) -> Iterator[None]:
    """Undo what the passes in the `with` block change in attributes of the model, and log it; the
    first step of the optimizer is watched too.
    """
    if ctx.world.is_rank_zero:
        before: list[Attributes] = []

        def note(_optimizer: Optimizer, _args: Any, _named: Any) -> None:
            before.append(Attributes(ctx.optimizer))

        def report(_optimizer: Optimizer, _args: Any, _named: Any) -> None:
            for hook in hooks:
                hook.remove()
            changed = before[0].find_changed()
            if changed:
                log.warn(
                    "attributes-not-kept",
                    message=f"a step changes {describe_changed(changed, in_optimizer=True)}",
                )

        hooks = [
            ctx.optimizer.register_step_pre_hook(note),
            ctx.optimizer.register_step_post_hook(report),
        ]
    attributes = Attributes(ctx.module)
    yield
    changed = attributes.restore()
    if changed and ctx.world.is_rank_zero:
        log.warn("attributes-not-kept", message=f"a pass changes {describe_changed(changed)}")
