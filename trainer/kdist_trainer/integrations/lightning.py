"""`KdistCallback` for Lightning's `Trainer`, of `lightning` as of `pytorch_lightning`.

    trainer = lightning.Trainer(strategy="ddp", callbacks=[KdistCallback()], …)
    trainer.fit(model, loader)

The callback saves and resumes through kdist's checkpoints, and reports steps and losses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kdist_trainer.config import DEFAULT_KEEP
from kdist_trainer.integrations import framework
from kdist_trainer.integrations.framework import STEP_LOSS, FrameworkCheckpoints
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.numerics import rng
from kdist_trainer.processes.liveness import Phase

if TYPE_CHECKING or "lightning" not in sys.modules:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.utilities.exceptions import SIGTERMException
else:  # the script's own: the two distributions' classes differ
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.exceptions import SIGTERMException

_FILE = "lightning.ckpt"


class KdistCallback(Callback):
    """Reports a Lightning training's steps, saves it, stops it on SIGTERM when all ranks have
    saved, and resumes it.

    The checkpoints are those of `Trainer.save_checkpoint`, in the job's checkpoint folder. A
    `ModelCheckpoint` of the script's own saves where and when it would without. After a stop the
    script ends as Lightning ends it on SIGTERM, and the same command continues it.
    """

    def __init__(
        self,
        *,
        every_seconds: int | Literal["auto"] = "auto",
        every_steps: int | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> None:
        """Do nothing until `Trainer.fit`.

        Args:
            every_seconds: time between two checkpoints; `"auto"` loses the least training time.
            every_steps: number of steps between two checkpoints, in addition.
            keep: number of checkpoints to keep.
        """
        self._reporter = Reporter()
        self._checkpoints = FrameworkCheckpoints(
            "lightning", self._reporter, every_seconds, every_steps, keep
        )
        self._restored = ""
        self._saved: dict[str, Any] = {}
        """This rank's generators, as they were saved, and whether an epoch had just ended."""
        self._target_steps: int | None = None
        self._step = 0
        self._loss: Tensor | None = None
        self._samples = 0
        self._learning_rate: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Restore the newest checkpoint that verifies. Only now is there a process group."""
        if getattr(trainer, "fast_dev_run", False) or not self._checkpoints.open():
            return
        found = self._checkpoints.find()
        if found is not None:
            self._restored = str(Path(found[1], _FILE))
            # what `fit(ckpt_path=...)` calls: there is no public way to it from a hook
            trainer._checkpoint_connector.restore(self._restored)
            folder = Path(found[1])
            self._saved = framework.load_generators(folder, trainer.global_rank, trainer.world_size)
            if self._saved.get("epoch_ended"):
                # the loader of the next epoch begins after this, and draws a number
                rng.restore_generators(self._saved.pop("generators"))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Take SIGTERM back: Lightning's handler waits in a collective."""
        self._checkpoints.listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Take SIGTERM back, find out how many steps there are, and have the random numbers
        continue where the epoch does, whatever its loader has drawn to begin again.

        Raises:
            ValueError: the script has had another checkpoint restored over kdist's.
        """
        self._checkpoints.listen()
        if self._restored and str(trainer.ckpt_path) != self._restored:
            raise ValueError(
                f"Trainer.fit(ckpt_path={str(trainer.ckpt_path)!r}) was restored over the newer "
                f"checkpoint {self._restored}: leave ckpt_path out, KdistCallback resumes by itself"
            )
        if "generators" in self._saved:
            rng.restore_generators(self._saved.pop("generators"))
        steps = trainer.estimated_stepping_batches
        self._target_steps = int(steps) if 0 < steps < float("inf") else None
        self._step = trainer.global_step

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - Lightning's signature
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Remember the learning rate of the step, which its end may change."""
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else []
        self._learning_rate = groups[0]["lr"] if groups else None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - Lightning's signature
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Report the step, and save or stop if all ranks agree to."""
        loss = outputs.get(STEP_LOSS) if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # of a part of the step where gradients are accumulated
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._samples += _count_samples(batch)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        # as often as Lightning logs: to read a loss waits for the device
        logs = self._step % max(1, getattr(trainer, "log_every_n_steps", 1)) == 0
        self._reporter.step(
            step=self._step,
            target_steps=self._target_steps,
            samples=self._samples,
            learning_rate=self._learning_rate,
            loss=float(self._loss) if logs and self._loss is not None else None,
        )
        self._loss, self._samples = None, 0
        if self._checkpoints.is_due(self._step):
            self._save(trainer)
        if self._checkpoints.stopping:
            self._checkpoints.close()
            raise SIGTERMException

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Report to the agent that an evaluation is going on."""
        self._reporter.begin(Phase.EVALUATE)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Report an evaluation, of the metrics whose names say that they are of one."""
        if not trainer.sanity_checking:
            self._reporter.evaluated(framework.evaluation_metrics(trainer.callback_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Save the last step, and wait for its commit."""
        self._save(trainer)
        self._checkpoints.close()
        self._reporter.flush()

    def _save(self, trainer: Trainer) -> None:
        def write(folder: Path) -> None:
            trainer.save_checkpoint(folder / _FILE, weights_only=False)
            ended = bool(trainer.is_last_batch)
            framework.save_generators(folder, trainer.global_rank, epoch_ended=ended)

        self._checkpoints.save(self._step, write)


def _count_samples(batch: Any) -> int:
    """The size of the first tensor in a batch; 0 if there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | list | tuple):
        return next((size for part in parts if (size := _count_samples(part))), 0)
    return 0
