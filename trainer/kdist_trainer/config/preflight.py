"""`spec.preflight`: what must hold between the ranks of a group before they train."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from kdist_trainer.config.model import Model

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
QUANTITY = r"^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti|k|M|G|T)$"

Bytes = Annotated[str, Field(max_length=32, pattern=QUANTITY)]
"""A number of bytes as Kubernetes writes quantities: `64Mi`, `1G`."""


def count_bytes(quantity: str) -> int:
    """Bytes of a `Bytes`. Raises `ValueError` for anything else."""
    if re.match(QUANTITY, quantity) is None:
        raise ValueError(f"{quantity!r} is no quantity of bytes")
    number = quantity.rstrip("kKMGTi")
    return int(number) * _UNITS[quantity[len(number) :]]


class AllReduceCheck(Model):
    """An all-reduce that every group of ranks must do fast enough."""

    min_bus_bandwidth: Bytes = Field(
        description="minBusBandwidth that the ranks must reach: nccl-tests' busbw in bytes per second, such as 10G or 500Mi."
    )
    size: Bytes = Field("64Mi", description="size of the buffer that is all-reduced.")


class Preflight(Model):
    """What is measured before the first step of every group of ranks; a group that is too slow ends the job."""

    all_reduce: AllReduceCheck | None = Field(None, description="allReduce: the bus bandwidth that is demanded.")
