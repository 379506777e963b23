"""A short training in the process of the test, as the only rank: `pytest`."""

from train import train


def test_a_short_training_lowers_the_loss() -> None:
    assert train(epochs=3) < 1.5  # 2.3 is guessing
