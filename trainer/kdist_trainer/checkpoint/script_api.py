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

from types import TracebackType
from typing import Any, Literal

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer import log
from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.agreement import SaveAgreement
from kdist_trainer.checkpoint.checkpointer import CheckpointManager, SaveResult
from kdist_trainer.checkpoint.environment import ScriptWorld, open_manager
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.config import Checkpointing, Every
from kdist_trainer.metrics.reporter import Reporter


class Checkpointer:
    """Saves and restores model, optimizer, scheduler and `state`, a dict of JSON values.

    SIGTERM sets `stop_requested` on all ranks at the same step, with the state saved; a second
    SIGTERM ends the process at once.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        every_seconds: int = 300,
        every_steps: int | None = None,
        mode: Literal["async", "blocking"] = "async",
        keep: int = 3,
    ) -> None:
        """Lock the job's checkpoint folder.

        Args:
            model: the model, which may be wrapped by DDP or FSDP.
            optimizer: its optimizer.
            scheduler: its learning rate scheduler, if any.
            every_seconds: time between two saves of `maybe_save`.
            every_steps: number of steps between two saves of `maybe_save`, in addition.
            mode: `async` writes while the script continues, `blocking` before `save` returns.
            keep: number of checkpoints to keep.

        Raises:
            CheckpointMismatchError: the folder belongs to another run.
            StorageError: the folder cannot be written.
        """
        self.state: dict[str, Any] = {}
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._every_steps = every_steps
        self._store = open_manager(
            CheckpointManager,
            Checkpointing(every=Every(seconds=every_seconds), mode=mode, keep=keep),
        )
        self._agreement: SaveAgreement | None = None
        self._reporter = Reporter()
        self._stats = self._reporter.stats
        if self._store is not None:
            self._agreement = SaveAgreement(
                CheckpointGroup(ScriptWorld.current()), every_seconds=every_seconds
            )
            self._store.on_result = self._report
            self._stats.checkpoint_interval = every_seconds
            self._agreement.listen()

    @property
    def stop_requested(self) -> bool:
        """Whether all ranks have agreed to stop. The state as of the last `maybe_save` is saved."""
        return self._agreement is not None and self._agreement.stopping

    def resume(self) -> int:
        """Restore everything from the newest checkpoint that verifies.

        Returns:
            Its step; 0 if there is none.

        Raises:
            CheckpointMismatchError: it is of another model, or there are checkpoints and none can
                be read.
        """
        if self._store is None:
            return 0
        fresh = not self._optimizer.state
        tensors = self._tensors()
        state = self._store.load(tensors, fingerprint="")
        for fallback in self._store.fallbacks:
            self._stats.add_fallback(fallback.cause)
        if state is None:
            if fresh:
                # `_tensors` has had the optimizer take an empty step
                self._optimizer.state.clear()
            return 0
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        if self._scheduler is not None:
            self._scheduler.load_state_dict(tensors["scheduler"][0])
        self.state = state["state"]
        self._stats.add_checkpoint("restore")
        log.event(
            "resumed",
            step=state["step"],
            checkpoint=self._store.resumed.name if self._store.resumed else None,
        )
        return int(state["step"])

    def save(self, step: int, *, required: bool = False) -> None:
        """Save now.

        Args:
            step: number of completed steps.
            required: whether to wait and raise `StorageError` on a failure, which otherwise is only
                logged.
        """
        if self._store is None or self._agreement is None:
            return
        self._agreement.saved()
        state = {"step": step, "state": self.state}
        self._store.save(
            self._tensors(), state, step=step, required=required, first=_buffers(self._model)
        )

    def maybe_save(self, step: int) -> bool:
        """Save if a save is due, or if a stop was requested on any rank. Call it after every step.

        Args:
            step: number of completed steps.

        Returns:
            Whether it saved.
        """
        if self._store is None or self._agreement is None or self._agreement.stopping:
            return False
        self._store.poll()
        due = self._every_steps is not None and step % self._every_steps == 0
        due |= self._agreement.poll()
        if due or self._agreement.stopping:
            self.save(step, required=self._agreement.stopping)
        return due or self._agreement.stopping

    def finish(self, step: int, **outcome: Any) -> None:
        """Save for the last time and mark the run as ended: started again, it does nothing.

        Args:
            step: number of completed steps.
            outcome: values to store with the result, as JSON.
        """
        if self._store is not None:
            document = {"outcome": "done", **outcome}
            state = {"step": step, "state": self.state}
            self._store.save(
                self._tensors(), state, step=step, final=document, first=_buffers(self._model)
            )

    def close(self) -> None:
        """Wait for the save in progress and release the folder; before `destroy_process_group`."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def _report(self, result: SaveResult) -> None:
        """Send the result of a save to the agent: the script may have no `Reporter` of its own."""
        result.add_to(self._stats)
        self._reporter.flush()

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        tensors: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if self._scheduler is not None:
            # in a tuple, because a dict would be flattened, and its keys need not be strings
            tensors["scheduler"] = (self._scheduler.state_dict(),)
        return tensors


def _buffers(model: nn.Module) -> set[str]:
    """Flat names of the buffers in the state, which differ between ranks; DDP uses rank 0's."""
    return {
        f"model.{full}"
        for name, _ in model.named_buffers()
        for full in torch_internals.full_names(model, name)
    }
