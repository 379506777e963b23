"""A model's own `train` is called on the way into eval mode and back."""

from __future__ import annotations

from torch import nn

from kdist_trainer.state import eval_mode


class Swapping(nn.Module):
    """Swaps something whenever its mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.swapped = False

    def train(self, mode: bool = True) -> Swapping:
        if mode != self.training:
            self.swapped = not self.swapped
        return super().train(mode)


def test_a_model_is_in_its_own_mode_again_and_knows_it() -> None:
    model = Swapping()
    model.norm.eval()
    with eval_mode(model):
        inside = (model.swapped, model.training)
    assert inside == (True, False)
    assert (model.swapped, model.training, model.norm.training) == (False, True, False)
