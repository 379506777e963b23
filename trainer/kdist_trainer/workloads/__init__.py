"""The shipped workloads, one file each, named as the user writes it; and how a user's own class is found."""

from __future__ import annotations

from kdist_trainer.workload import Workload


def load(name: str) -> type[Workload]:
    from kdist_trainer.workloads.digits import Digits

    assert name == "digits"
    return Digits
