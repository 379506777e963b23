"""Event files that TensorBoard shows: `TensorBoardWriter` writes them beside the checkpoints,
`python -m` it shows them.
"""

from kdist_trainer.tensorboard.writer import FOLDER, TensorBoardWriter

__all__ = ["FOLDER", "TensorBoardWriter"]
