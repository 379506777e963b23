"""The parameter groups of an optimizer by the names of their parameters: those that a training has
added in mid-run are added again when it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from kdist_trainer.errors import CheckpointMismatchError, ConfigError

Groups = Sequence[Sequence[str]]


def name_groups(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    """The names of the parameters of each group. Raises `ConfigError` if one has none."""
    groups = []
    for group in optimizer.param_groups:
        unknown = next((one for one in group["params"] if one not in names), None)
        if unknown is not None:
            raise ConfigError(
                f"Checkpointer: an optimizer has a parameter of shape {tuple(unknown.shape)} that "
                "is in no module of model=: give every module, by name if there are several"
            )
        groups.append([names[one] for one in group["params"]])
    return groups


def add_groups(
    optimizer: Optimizer, saved: Groups, names: Mapping[Tensor, str], *, title: str
) -> int:
    """Add the groups that the saved optimizer has beyond this one; their numbers are loaded later.

    Args:
        optimizer: the script's optimizer as it begins.
        saved: the names of the parameters of each saved group.
        names: the name of each parameter.
        title: of the optimizer, for the error.

    Returns:
        How many were added.

    Raises:
        CheckpointMismatchError: the groups differ otherwise; the message says what to do.
    """
    own = name_groups(optimizer, names)
    if len(own) > len(saved):
        raise CheckpointMismatchError(
            f"{title} has {len(own)} parameter groups and the checkpoint {len(saved)}: call "
            "add_param_group for what is new only after Checkpointer.resume(), at the step where "
            "the training adds it"
        )
    parameters = {name: one for one, name in names.items()}
    taken = {name for group in own for name in group}
    for number, group in enumerate(saved[len(own) :], start=len(own)):
        missing = [name for name in group if name not in parameters]
        double = [name for name in group if name in taken]
        if missing or double:
            why = (
                f"{missing[0]} is not in the model: make it before Checkpointer.resume(), if need "
                "be by Checkpointer.state"
                if missing
                else f"{double[0]} is in another group of the script's: give the optimizer the "
                "groups that it had when the training began"
            )
            raise CheckpointMismatchError(
                f"{title} has {len(own)} parameter groups and the checkpoint {len(saved)}; group "
                f"{number} ({', '.join(group[:3])}{', …' if len(group) > 3 else ''}) cannot be "
                f"added: {why}"
            )
        optimizer.add_param_group({"params": [parameters[name] for name in group]})
        taken |= set(group)
    return len(saved) - len(own)
