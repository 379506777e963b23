"""The modules, optimizers, schedulers and scalers of a script, by name, as one state: what of it is
saved, what a saved one is read into, and how it is loaded.

One object given alone has no name of its own: its state is `model`, `optimizer`, `scheduler` and
`scaler`. Of several, each is one level below: `model.generator`, `optimizer.generator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from kdist_trainer import state
from kdist_trainer.checkpoint.param_groups import add_groups, name_groups
from kdist_trainer.errors import ConfigError

ALONE: Final = ""
"""The name of an object that is given alone."""
_RESERVED: Final = frozenset({"state", "param_groups"})

T = TypeVar("T")


class Keeper(Protocol):
    """A scheduler or scaler: its state is a small dict."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from a state."""


class ScriptObjects:
    """What a script trains with."""

    def __init__(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        scheduler: Keeper | Mapping[str, Keeper] | None,
        scaler: Keeper | Mapping[str, Keeper] | None,
    ) -> None:
        """Name the objects; changes nothing.

        Raises:
            ConfigError: a name cannot be used, or an object is of a kind that cannot be saved.
        """
        self._module = (
            model if isinstance(model, nn.Module) else _Modules(_named("model", model, nn.Module))
        )
        self.optimizers = _named("optimizer", optimizer, Optimizer)
        self.keepers: dict[str, dict[str, Keeper]] = {
            "scheduler": _named("scheduler", scheduler),
            "scaler": _named("scaler", scaler),
        }
        if not self.optimizers:
            raise ConfigError("Checkpointer: give at least one optimizer")
        if any(isinstance(one, FullyShardedDataParallel) for one in self._module.modules()):
            raise ConfigError(
                "Checkpointer: the model is wrapped by FullyShardedDataParallel, whose parts no "
                "checkpoint of kdist can hold: wrap it by torch.distributed.fsdp.fully_shard"
            )
        self.names()  # raises if an optimizer has a parameter that no module has
        self._first_buffers = self._buffers()
        self._first_frozen = self.frozen()
        self._added: dict[str, int] = {}

    def names(self) -> dict[Tensor, str]:
        """The name of each parameter. Raises `ConfigError` if an optimizer has one without."""
        names = state.parameter_names(self._module)
        for optimizer in self.optimizers.values():
            name_groups(optimizer, names)
        return names

    def frozen(self) -> list[str]:
        """Names of the parameters that get no gradient."""
        return [name for one, name in self.names().items() if not one.requires_grad]

    def _freeze(self, notes: Mapping[str, Any]) -> None:
        """Freeze and unfreeze the parameters as the training had done in mid-run."""
        before, after = set(notes.get("frozen_at_start", ())), set(notes.get("frozen", ()))
        for one, name in self.names().items():
            if (name in before) != (name in after):
                one.requires_grad_(name not in after)

    def read(self) -> dict[str, Any]:
        """The nested state: tensors in use, not copies. Nothing changes."""
        names = self.names()
        found: dict[str, Any] = {
            "model": state.read_module(self._module),
            "optimizer": _nest(self.optimizers, lambda _, each: state.read_optimizer(each, names)),
        }
        for kind, keepers in self.keepers.items():
            if keepers:
                # in a tuple, because a dict would be flattened, and its keys need not be texts
                found[kind] = _nest(keepers, lambda _, each: (each.state_dict(),))
        return found

    def of_rank_zero(self) -> set[str]:
        """Flat names of the buffers, which differ between ranks; DDP uses rank 0's."""
        parameters = set(self.names().values())
        return {
            f"model.{name}" for name in state.read_module(self._module) if name not in parameters
        }

    def describe(self) -> dict[str, Any]:
        """Notes on the state, which are read before it: its groups, and buffers that were made."""
        names = self.names()
        now = self._buffers()
        return {
            "groups": {name: name_groups(each, names) for name, each in self.optimizers.items()},
            "frozen": self.frozen(),
            "frozen_at_start": self._first_frozen,
            "absent_buffers": state.absent_buffers(self._module),
            "made_buffers": [
                name for name, kind in now.items() if self._first_buffers.get(name) != kind
            ],
        }

    def prepare(self, notes: Mapping[str, Any]) -> None:
        """Before a state is loaded: groups that the training has added are added, and parameters
        that it has unfrozen or frozen are so again.

        Args:
            notes: what `describe` gave; empty in checkpoints of earlier versions.

        Raises:
            CheckpointMismatchError: the groups of an optimizer cannot be those that were saved.
        """
        names = self.names()
        for name, optimizer in self.optimizers.items():
            first = len(optimizer.param_groups) - self._added.pop(name, 0)
            del optimizer.param_groups[first:]  # for a checkpoint that could not be read
            if name in notes.get("groups", {}):
                groups = notes["groups"][name]
                self._added[name] = add_groups(optimizer, groups, names, title=_title(name))
        self._freeze(notes)

    def template(
        self, notes: Mapping[str, Any], kinds: Mapping[str, state.ValueKind]
    ) -> dict[str, Any]:
        """A state of the saved shape to be filled. Nothing changes.

        Args:
            notes: what `describe` gave.
            kinds: what the checkpoint has.
        """
        buffers = self._buffer_names(notes)
        found: dict[str, Any] = {}

        def of_optimizer(name: str, each: Optimizer) -> Any:
            prefix = f"optimizer.{name}." if name else "optimizer."
            own = {
                f"optimizer.{flat.removeprefix(prefix)}": kind
                for flat, kind in kinds.items()
                if flat.startswith(prefix)
            }
            model = {flat: kind for flat, kind in kinds.items() if flat.startswith("model.")}
            made = state.template(self._module, each, own | model, **buffers)
            found["model"] = made["model"]
            return made["optimizer"]

        found["optimizer"] = _nest(self.optimizers, of_optimizer)
        for kind, keepers in self.keepers.items():
            if keepers:
                found[kind] = _nest(keepers, lambda *_: None)
        return found

    def load(self, notes: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Load what a `template` was filled with.

        Raises:
            CheckpointMismatchError: it is of another model or optimizer.
        """
        problems = self.find_problems(notes, saved)
        if problems:
            raise state.StateMismatchError(problems)
        self._added.clear()
        names = self.names()
        optimizers = _flat(self.optimizers, saved["optimizer"])
        buffers = self._buffer_names(notes)
        state.load_module(self._module, saved["model"], **buffers)
        for name, each in self.optimizers.items():
            state.load_optimizer(each, names, optimizers[name])
        for kind, keepers in self.keepers.items():
            for name, (own,) in _flat(keepers, saved.get(kind)).items():
                if own:  # a scaler that was disabled has no state
                    keepers[name].load_state_dict(own)

    def find_problems(self, notes: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """Why a state cannot be loaded; empty if it can."""
        names = self.names()
        optimizers = _flat(self.optimizers, saved["optimizer"])
        buffers = self._buffer_names(notes)
        problems = state.find_module_problems(self._module, saved["model"], **buffers)
        for name, each in self.optimizers.items():
            found = state.find_optimizer_problems(each, names, optimizers[name])
            problems += [f"{_title(name)}: {one}" for one in found]
        return problems

    def _buffers(self) -> dict[str, state.ValueKind]:
        parameters = set(state.parameter_names(self._module).values())
        return {
            name: state.kind_of(value)
            for name, value in state.read_module(self._module).items()
            if isinstance(value, Tensor) and name not in parameters
        }

    def _buffer_names(self, notes: Mapping[str, Any]) -> dict[str, list[str]]:
        return {
            "absent": notes.get("absent_buffers", []),
            "made": notes.get("made_buffers", []),
        }


class _Modules(nn.Module):
    """Several modules by name, so that one state has all of them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            try:
                self.add_module(name, module)
            except KeyError as error:
                raise ConfigError(f"Checkpointer: model={{{name!r}: …}}: {error}") from None


def _named(argument: str, given: Any, kind: type | None = None) -> dict[str, Any]:
    """The objects of an argument by name. Raises `ConfigError` if one cannot be used."""
    objects = given if isinstance(given, Mapping) else {} if given is None else {ALONE: given}
    for name, one in objects.items():
        if name != ALONE and not (isinstance(name, str) and name.isidentifier()):
            raise ConfigError(
                f"Checkpointer: {argument}={{{name!r}: …}}: names are identifiers, as 'generator'"
            )
        if name in _RESERVED:
            raise ConfigError(f"Checkpointer: {argument}={{{name!r}: …}}: choose another name")
        if kind is not None and not isinstance(one, kind):
            raise ConfigError(
                f"Checkpointer: {argument} is a {type(one).__name__}, not of torch's "
                f"{kind.__name__}; what else has state_dict and load_state_dict goes into stateful="
            )
    if isinstance(given, Mapping) and ALONE in objects:
        raise ConfigError(f"Checkpointer: {argument}: a name is empty")
    return dict(objects)


def _title(name: str) -> str:
    return f"optimizer {name!r}" if name else "the optimizer"


def _nest(objects: Mapping[str, T], value_of: Callable[[str, T], Any]) -> Any:
    """The value of the one object, or the values by name."""
    if ALONE in objects:
        return value_of(ALONE, objects[ALONE])
    return {name: value_of(name, one) for name, one in objects.items()}


def _flat(objects: Mapping[str, Any], nested: Any) -> dict[str, Any]:
    """The values that `_nest` made, by name."""
    if not objects:
        return {}
    return {ALONE: nested} if ALONE in objects else dict(nested)
