"""`KdistTracker` for Accelerate: alone it shows what `Accelerator.log` is given; two more lines in
the script's own loop save, stop and resume it.

    tracker = KdistTracker()
    accelerator = Accelerator(log_with=tracker)
    …
    accelerator.init_trackers("digits", {"max_train_steps": steps})
    done = tracker.resume(accelerator)                      # after prepare; 0 without a checkpoint
    …
        accelerator.log({"loss": loss.item()}, step=step)
        if tracker.step(step, samples=len(batch)):          # saves if it is time to
            break                                           # SIGTERM: all ranks have saved
    accelerator.end_training()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from kdist_trainer.config import DEFAULT_KEEP
from kdist_trainer.integrations import framework
from kdist_trainer.integrations.framework import FrameworkCheckpoints
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Phase


class KdistTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate ships no types
    """Reports what Accelerate logs; saves and resumes with `Accelerator.save_state`.

    Losses are read from `loss` or `train_loss`, learning rates from `learning_rate` or `lr`,
    evaluations from names that begin with `eval` or `val`, the number of steps from
    `max_train_steps` or `max_steps` in the configuration of `init_trackers`.
    """

    name = "kdist"
    requires_logging_directory = False

    def __init__(
        self,
        *,
        every_seconds: int | Literal["auto"] = "auto",
        every_steps: int | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> None:
        """Report to nobody yet.

        Args:
            every_seconds: time between two checkpoints; `"auto"` loses the least training time.
            every_steps: number of steps between two checkpoints, in addition.
            keep: number of checkpoints to keep.
        """
        super().__init__()
        self._reporter = Reporter()
        self._checkpoints = FrameworkCheckpoints(
            "accelerate", self._reporter, every_seconds, every_steps, keep
        )
        self._accelerator: Accelerator | None = None
        self._target_steps: int | None = None
        self._logged: dict[str, Any] = {}
        self._last_step: int | None = None

    @property
    def tracker(self) -> Reporter:
        return self._reporter

    def store_init_configuration(self, values_of_run: dict[str, Any]) -> None:
        """Read the number of steps from the configuration of the run."""
        target = framework.choose_value(values_of_run, framework.TARGETS)
        self._target_steps = None if target is None else int(target)

    def log(self, logged: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Report what the script logs. Accelerate calls it on the main process."""
        metrics = framework.evaluation_metrics(logged)
        if metrics:
            self._reporter.evaluated(metrics)
        known: dict[str, Any] = {
            "loss": framework.choose_value(logged, framework.LOSS),
            "learning_rate": framework.choose_value(logged, framework.LEARNING_RATE),
            "grad_norm": framework.choose_value(logged, framework.GRAD_NORM),
        }
        if all(value is None for value in known.values()):
            return
        if self._accelerator is not None:
            self._logged = known
        else:
            self._reporter.step(step=step, target_steps=self._target_steps, **known)

    def resume(self, accelerator: Accelerator) -> int:
        """Load the newest checkpoint that verifies, after `init_trackers` and `prepare`, on every
        rank.

        Args:
            accelerator: whose state it is.

        Returns:
            The number of completed steps; 0 without a checkpoint, and outside kdist.

        Raises:
            CheckpointMismatchError: it was written by another framework, or is unreadable.
        """
        self._accelerator = accelerator
        if not accelerator.is_main_process and self not in accelerator.trackers:
            accelerator.trackers.append(self)  # so that `end_training` waits on every rank
        found = self._checkpoints.find() if self._checkpoints.open() else None
        if self._checkpoints.group is not None:
            self._target_steps = self._checkpoints.group.broadcast(self._target_steps)
        if found is None:
            return 0
        step, folder = found
        accelerator.load_state(folder)
        return step

    def step(self, step: int, *, samples: int = 0) -> bool:
        """Report a completed step; save if a save is due, or if a stop was requested on any rank.
        Called on every rank, after `Accelerator.log`.

        Args:
            step: the number of completed steps.
            samples: samples that this rank consumed in it.

        Returns:
            Whether to stop: all ranks have saved this step.
        """
        self._reporter.step(
            step=step, target_steps=self._target_steps, samples=samples, **self._logged
        )
        self._logged, self._last_step = {}, step
        if self._checkpoints.is_due(step):
            self._save()
        return self._checkpoints.stopping

    def evaluating(self) -> None:
        """Report to the agent that an evaluation is going on; called after each of its batches."""
        self._reporter.begin(Phase.EVALUATE)

    def finish(self) -> None:
        """Save the last step, and wait for its commit; `Accelerator.end_training` calls it."""
        self._save()
        self._checkpoints.close()
        self._reporter.flush()

    def _save(self) -> None:
        accelerator = self._accelerator

        def write(folder: Path) -> None:
            if accelerator is not None:
                accelerator.save_state(str(folder))

        if self._last_step is not None:
            self._checkpoints.save(self._last_step, write)
