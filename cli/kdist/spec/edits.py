"""The rules for jobs that are edited between two runs: those of the trainer, which applies them to
checkpoints. Only `kdist run` needs them, so they are not in `kdist.spec` itself.
"""

from kdist_trainer.config.changes import compare_done

__all__ = ["compare_done"]
