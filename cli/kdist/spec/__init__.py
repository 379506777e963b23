"""`TrainingJob`: what a job.yaml may say. The schema, `kdist explain`, `kdist init` and the
documentation are made from it.

This room is the only bridge to the trainer: others take `TrainConfig` and `Exit` from here.
"""

from __future__ import annotations

from kdist.spec.models import Checkpoints, Data, EnvVar, Resources, SecretKey, Toleration
from kdist.spec.training_job import API_VERSION, KIND, Metadata, Spec, TrainingJob
from kdist.spec.validators import RUN
from kdist_trainer.config import Cause, Exit, Nodes, Script, TrainConfig, Training, judge_done

__all__ = [
    "API_VERSION",
    "KIND",
    "RUN",
    "Cause",
    "Checkpoints",
    "Data",
    "EnvVar",
    "Exit",
    "Metadata",
    "Nodes",
    "Resources",
    "Script",
    "SecretKey",
    "Spec",
    "Toleration",
    "TrainConfig",
    "Training",
    "TrainingJob",
    "judge_done",
]
