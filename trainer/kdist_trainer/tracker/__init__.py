"""Sends the curve of a managed training to Weights & Biases or MLflow: `train.tracker`.

`python -m kdist_trainer.tracker` is a process of its own next to the agent of group rank 0, so that
no tracker can hold or end a training. It follows the run's ledger (`committed`) and gives the
tracker (`wandb`, `mlflow`) each step once: those that a checkpoint holds, and that it does not have
yet. Not here: the curve of a script, which logs by itself (`script.tracker_identity`).
"""
