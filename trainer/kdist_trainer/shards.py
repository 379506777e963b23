"""What one rank holds of a tensor that may be spread over several."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, the whole of one that is not spread; without its history."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
