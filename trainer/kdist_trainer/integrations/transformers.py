"""`KdistTrainerCallback` for Hugging Face's `Trainer`.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[KdistTrainerCallback()])
    trainer.train()

A callback does not know its trainer and cannot choose what `train` resumes from. So importing this
module wraps `Trainer.train`: where the trainer has this callback and kdist has a checkpoint, it
resumes from that one. Nothing else of transformers is changed.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from kdist_trainer.config import DEFAULT_KEEP, Exit
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.integrations import framework
from kdist_trainer.integrations.framework import FrameworkCheckpoints
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Phase


class KdistTrainerCallback(TrainerCallback):
    """Reports a `Trainer`'s steps, commits its checkpoints, stops it on SIGTERM when all ranks
    have saved, and resumes it.

    Each checkpoint that the trainer saves by its own `save_strategy` is committed to the job's
    checkpoint folder too. It saves more often if `every_seconds` or `every_steps` ask for it; such
    a checkpoint does not stay in `output_dir`. After a stop the script ends, and the same command
    continues it.
    """

    def __init__(
        self,
        *,
        every_seconds: int | Literal["auto"] = "auto",
        every_steps: int | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> None:
        """Do nothing until `Trainer.train`.

        Args:
            every_seconds: time between two checkpoints; `"auto"` loses the least training time.
            every_steps: number of steps between two checkpoints, in addition.
            keep: number of checkpoints that stay in the job's checkpoint folder.
        """
        self._reporter = Reporter()
        self._checkpoints = FrameworkCheckpoints(
            "transformers", self._reporter, every_seconds, every_steps, keep
        )
        self._unreported: int | None = None  # a step whose loss is logged in a moment
        self._save_limit: int | None = None
        self._only_ours = False  # whether the trainer itself would not save this step

    def resume_path(self, args: TrainingArguments) -> str | None:
        """The folder of the newest checkpoint that verifies, for `resume_from_checkpoint`; None if
        there is none. Raises `ValueError` if the trainer saves too little to be resumed.
        """
        if not self._checkpoints.open():
            return None
        if args.save_only_model:
            raise ValueError(
                "TrainingArguments(save_only_model=True) leaves out the optimizer, without which a "
                "restart continues with another training: set it to False, or leave "
                "KdistTrainerCallback out"
            )
        found = self._checkpoints.find()
        return found[1] if found else None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> TrainerControl:
        """Report the step, unless its loss is logged next, and decide whether to save."""
        self._restore_limit(args)  # with save_strategy="best" the last save may not have come
        self._unreported = state.global_step
        if not control.should_log:
            self._report_step(args, state)
        is_last = state.global_step >= state.max_steps
        if self._checkpoints.is_due(state.global_step) or (is_last and self._checkpoints.group):
            if not control.should_save:
                control.should_save = self._only_ours = True
                # to rotate for it would remove one that the user has asked for
                self._save_limit, args.save_total_limit = args.save_total_limit, None
            if self._checkpoints.stopping:
                control.should_evaluate = False  # it may last longer than the grace period
                control.should_training_stop = True
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the trainer's signature
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report what the trainer logs of its training."""
        loss = framework.choose_value(logs or {}, (framework.STEP_LOSS,))
        if loss is None:
            return
        logged: dict[str, Any] = {
            "loss": loss,
            "learning_rate": framework.choose_value(logs or {}, framework.LEARNING_RATE),
            "grad_norm": framework.choose_value(logs or {}, framework.GRAD_NORM),
        }
        if self._unreported is not None:
            self._report_step(args, state, **logged)
        else:
            self._reporter.update(**logged)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the trainer's signature
        **_: Any,
    ) -> None:
        """Commit what the trainer has saved; end the script if all ranks have agreed to stop."""
        group = self._checkpoints.group
        if group is None:
            return
        source = Path(args.output_dir or "", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._checkpoints.save(state.global_step, lambda target: _copy(source, target, group))
        was_ours, is_best = self._restore_limit(args), state.best_model_checkpoint == str(source)
        if was_ours and not is_best and args.local_process_index == 0:
            shutil.rmtree(source, ignore_errors=True)
        if self._checkpoints.stopping:
            self._checkpoints.close()
            raise SystemExit(int(Exit.STOPPED))

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Report to the agent that an evaluation is going on."""
        self._reporter.begin(Phase.EVALUATE)

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the trainer's signature
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Report an evaluation."""
        self._reporter.evaluated(framework.evaluation_metrics(metrics or {}))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the trainer's signature
        **_: Any,
    ) -> None:
        """Wait for the last commit."""
        self._report_step(args, state)
        self._checkpoints.close()
        self._reporter.flush()

    def _restore_limit(self, args: TrainingArguments) -> bool:
        """Undo what a save of ours has changed; returns whether it was one."""
        if not self._only_ours:
            return False
        args.save_total_limit, self._only_ours = self._save_limit, False
        return True

    def _report_step(self, args: TrainingArguments, state: TrainerState, **logged: Any) -> None:
        if self._unreported is not None:
            self._reporter.step(
                step=self._unreported,
                target_steps=state.max_steps,
                samples=args.train_batch_size * args.gradient_accumulation_steps,
                **logged,
            )
            self._unreported = None


def _copy(source: Path, target: Path, group: CheckpointGroup) -> None:
    """Copy a checkpoint of the trainer. Where nodes do not share `output_dir`, each has a part of
    it: the lowest rank that sees a file copies it.
    """
    own = sorted(
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    )
    seen = group.gather(own)
    earlier = {name for names in seen[: group.rank] for name in names}
    for name in own:
        if name not in earlier:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _resuming(train: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train`, which resumes from kdist's checkpoint if there is one."""

    @functools.wraps(train)
    def resume_and_train(
        self: Trainer,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        callbacks = self.callback_handler.callbacks
        ours = next((one for one in callbacks if isinstance(one, KdistTrainerCallback)), None)
        if ours is not None and trial is None:
            resume_from_checkpoint = ours.resume_path(self.args) or resume_from_checkpoint
        return train(self, resume_from_checkpoint, trial, *args, **kwargs)

    return resume_and_train


Trainer.train = _resuming(Trainer.train)  # type: ignore[method-assign]  # on purpose
