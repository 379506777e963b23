"""TensorBoard: `writer` writes event files next to the checkpoints, and `python -m
kdist_trainer.tensorboard` serves them to `kdist port-forward NAME tensorboard`, from a bucket
through a copy that follows it.

`TensorBoardWriter` only converts what it is given; `kdist_trainer.training`, which loads it by
name, decides what to write. Metrics for Prometheus are in `kdist_trainer.metrics`. Nothing here
imports torch. Read `writer` first.
"""

from kdist_trainer.tensorboard.writer import FOLDER, TensorBoardWriter
