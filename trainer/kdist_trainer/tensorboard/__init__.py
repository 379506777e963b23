"""Event files that TensorBoard shows: `Curves` writes them beside the checkpoints, `python -m` it shows them."""

from kdist_trainer.tensorboard.writer import FOLDER, Curves

__all__ = ["FOLDER", "Curves"]
