"""A short training in the process of the test, as the only rank: `pytest`."""

from train import train


def test_a_short_training_lowers_the_loss() -> None:
    assert train(steps=40) < train(steps=10) < 2.5
