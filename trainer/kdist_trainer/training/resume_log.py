"""What is logged of where a worker group continues."""

from __future__ import annotations

from kdist_trainer import log
from kdist_trainer.config.changes import EditEffect
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.training_state import TrainState


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
    if asked := ctx.loader.past_end(step=saved.step, position=saved.samples_seen):
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
        why = "; ".join(reasons)
        log.event(
            "not-reproducible",
            why=why,
            message=f"the training continues correctly, but is not bitwise identical: {why}",
        )
