"""Checks everything that the training loop relies on, in one process: `pytest`."""

from workload import Classifier

from kdist_trainer.testing import check_workload


def test_the_training_loop_can_train_it() -> None:
    check_workload(Classifier, options={"width": 16})
