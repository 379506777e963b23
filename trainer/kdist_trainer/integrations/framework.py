"""What the integrations of all frameworks need: when a training is saved and stopped, and its
checkpoints (`FrameworkCheckpoints`); the generators of random numbers of each rank, as a file of
its own in a checkpoint, for frameworks that save none; and the names under which frameworks and
their users log what kdist shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from kdist_trainer import log
from kdist_trainer.checkpoint.checkpointer import FileCheckpointManager, WriteFiles
from kdist_trainer.checkpoint.interval import SaveClock, make_interval
from kdist_trainer.config import Checkpointing, Every, Keep
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.metrics.rank_metrics import WallCategory
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.numerics import rng
from kdist_trainer.processes.liveness import Phase
from kdist_trainer.script.api import SaveAgreement, close_manager, open_manager
from kdist_trainer.script.state import CHANGED

_trained: list[bool] = []  # that this process has opened the run's checkpoints once


class FrameworkCheckpoints:
    """The checkpoints of one training in the framework's own format. Every rank calls the same
    methods in the same order.
    """

    def __init__(
        self,
        framework: str,
        reporter: Reporter,
        every_seconds: int | Literal["auto"],
        every_steps: int | None,
        keep: int,
    ) -> None:
        """Open nothing yet: there may be no process group. The framework's name is stored with its
        checkpoints; the options are those of the integrations.
        """
        self._framework = framework
        self._reporter = reporter
        self._config = Checkpointing(every=Every.of(every_seconds), keep=Keep(last=keep))
        self._clock = SaveClock.from_environment(make_interval(self._config.every))
        self._every_steps = every_steps
        self._manager: FileCheckpointManager | None = None
        self._agreement: SaveAgreement | None = None
        self.group: CheckpointGroup | None = None
        """The ranks; None while nothing is open."""

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._agreement is not None and self._agreement.stopping

    def open(self) -> bool:
        """Lock the job's checkpoint folder, after `init_process_group`; returns whether there are
        checkpoints: not outside kdist. A script's first training alone has them: those of a second
        one would be taken for the first one's.

        Raises:
            CheckpointMismatchError: the folder belongs to another run, or the ranks do not share
                it.
            StorageError: the folder cannot be written.
        """
        if self._manager is not None:
            return True
        if _trained:
            log.warn(
                "checkpoints-off",
                message=(
                    "a script's first training alone is saved and resumed: this is another one"
                ),
            )
            return False
        self._manager = open_manager(FileCheckpointManager, self._config)
        if self._manager is None:
            return False
        _trained.append(True)
        self._agreement = SaveAgreement(
            self._manager, self._clock, self._reporter, self._every_steps
        )
        self.group = self._agreement.group
        self._clock.start()
        self.listen()
        return True

    def listen(self) -> None:
        """Take SIGTERM as a request to stop, also after the framework has taken it for itself."""
        if self._agreement is not None:
            self._agreement.install_handler()

    def find(self) -> tuple[int, str] | None:
        """Find the newest checkpoint that verifies: its step, and the path of the folder with the
        framework's files, which the framework then restores; None if there is none. Raises
        `CheckpointMismatchError` if it was written by another framework, or is unreadable.
        """
        if self._manager is None or self._agreement is None:
            return None
        began = time.monotonic()
        found = self._manager.find(self._framework)
        if found is None:
            self._agreement.restored(None)
            return None
        step, folder = found
        self._clock.start()
        self._agreement.restored(step)
        seconds = time.monotonic() - began
        self._reporter.stats.add_wall(WallCategory.CHECKPOINT_RESTORE, seconds)
        log.event("resumed", step=step, checkpoint=folder.parent.name)
        return step, str(folder)

    def is_due(self, step: int) -> bool:
        """Whether to save now, after `step` completed steps, the same on all ranks; called by all
        after every step.
        """
        agreement = self._agreement
        return agreement is not None and not agreement.stopping and agreement.is_due(step)

    def save(self, step: int, write: WriteFiles) -> None:
        """Have the framework write its files into a folder, by `write` on every rank, and commit
        them in the background; wait for the commit if the ranks are about to stop.

        Raises:
            StorageError: the state could not be saved before the stop. Otherwise a failure is
                logged and counted.
        """
        if self._manager is None or self._agreement is None:
            return
        self._clock.save_started(step)
        self._reporter.begin(Phase.SAVE)
        began = time.monotonic()
        self._manager.save_files(
            write,
            framework=self._framework,
            step=step,
            required=self._agreement.stopping,
            blocking=self._clock.must_block,
        )
        self._clock.save_stalled(time.monotonic() - began)

    def close(self) -> None:
        """Wait for the commit in progress and release the folder and SIGTERM."""
        if self._manager is not None and self._agreement is not None:
            close_manager(self._manager)
            self._agreement.remove_handler()
            self._reporter.begin(Phase.EXIT)  # what follows reports no steps
            self._manager.on_result = None  # a method of the agreement, which has the manager
            self._manager = self._agreement = self.group = None


def save_generators(folder: Path, rank: int, **notes: bool) -> None:
    """Write the states of this rank's generators, and notes of where the training is."""
    torch.save({"generators": rng.read_generators(), **notes}, _file(folder, rank))


def load_generators(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """What `save_generators` has written of this rank; empty if the checkpoint has nothing of it.
    Rank 0 logs if the checkpoint is of another number of ranks.
    """
    saved = len(list(folder.glob(_file(folder, 0).name.replace("0", "*"))))
    if rank == 0 and saved not in (0, size):
        log.warn(
            "rank-parts-changed",
            saved=saved,
            ranks=size,
            message=(
                f"{CHANGED.format('the random numbers', saved, size)}: those of ranks that are "
                "gone have no owner, and new ranks go on as the script seeds them"
            ),
        )
    file = _file(folder, rank)
    if not file.exists():
        return {}
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def _file(folder: Path, rank: int) -> Path:
    return folder / f"generators-{rank}.pt"


STEP_LOSS = "loss"
"""What a framework itself calls the loss of a step; its `train_loss` may be that of all steps."""
LOSS = (STEP_LOSS, "train_loss", "train/loss", "training_loss")
LEARNING_RATE = ("learning_rate", "lr", "train/learning_rate", "train/lr")
GRAD_NORM = ("grad_norm", "train/grad_norm")
_EVALUATION = ("eval_", "eval/", "validation_", "validation/", "val_", "val/", "test_", "test/")
TARGETS = ("max_train_steps", "max_steps", "total_steps", "num_training_steps")
"""Names of the number of steps in the configuration of a run."""


def choose_value(values: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """The number that is logged under the first of these names; None if there is none."""
    found = (_number(values.get(name)) for name in names)
    return next((number for number in found if number is not None), None)


def evaluation_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that an evaluation has logged, without the `eval_` or `val/` in front."""
    found = {}
    for name, value in values.items():
        prefix = next((one for one in _EVALUATION if name.startswith(one)), None)
        number = _number(value)
        if prefix is not None and number is not None:
            found[name.removeprefix(prefix)] = number
    return found


def _number(value: Any) -> float | None:
    """A number, or a tensor of one, as a float; None for anything else."""
    if isinstance(value, bool | str) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several
        return None
