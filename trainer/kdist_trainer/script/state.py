"""The whole state of a user's script: its modules, optimizers, schedulers and scalers by name,
the settings of these, and each rank's own part.

One object given alone has no name of its own: its state is `model`, `optimizer`, `scheduler` and
`scaler`. Of several, each is one level below: `model.generator`, `optimizer.generator`. Parameter
groups are saved by the names of their parameters: those that a training has added in mid-run are
added again when it is resumed. A resume takes the saved lr, weight decay or T_max, so an edit of
the script has no effect, which is reported.

A rank's own part is `state`, the objects of `stateful` and the random number generators. All parts
are one small value of the checkpoint, which rank 0 writes and every rank reads. When the number of
ranks has changed, `state` and the generators are those of the rank's number; an object of
`stateful` says by `load_all_state_dicts` how it goes on, or the resume is refused. Positions of
data loaders take kilobytes; what is large belongs into a module, whose tensors all ranks write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from kdist_trainer import log, state
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.manifest import UnloadableStateError, encode
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex, copy_value, describe_index
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.errors import CheckpointMismatchError, ConfigError
from kdist_trainer.numerics import rng
from kdist_trainer.state import ValueKind, describe


class StatefulObject(Protocol):
    """What can be saved as it is: a scheduler, a scaler, torchdata's `StatefulDataLoader`. One of
    `stateful` may also have `load_all_state_dicts(states, rank, world_size)`, which continues at
    another number of ranks from the states of all ranks, by rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from a state."""


class Part(NamedTuple):
    """What is saved of one rank."""

    state: dict[Any, Any]
    own: dict[str, Any]
    """The states of `stateful` and of the generators; empty in checkpoints of earlier versions."""


class RankPart:
    """This rank's `state`, its stateful objects and its generators."""

    def __init__(self, stateful: Mapping[str, StatefulObject]) -> None:
        self.state: dict[Any, Any] = {}
        self._stateful: dict[str, Any] = dict(stateful)
        self._generators: dict[str, Any] | None = None
        """As they were saved with the state that was resumed."""

    def read(self) -> Part:
        """The part as it is now, in memory of its own. Raises `UnloadableStateError` if a
        checkpoint cannot hold a value.
        """
        encode(self.state, "Checkpointer.state")
        stateful = {
            name: copy_value(one.state_dict(), f"stateful[{name!r}]")
            for name, one in self._stateful.items()
        }
        generators = copy_value(rng.read_generators(), "generators")
        return Part(self.state, {"stateful": stateful, "generators": generators})

    def load(self, parts: Sequence[Part], rank: int, size: int) -> None:
        """Continue from the parts of all ranks; a rank that is new begins with an empty `state`.
        Raises `CheckpointMismatchError` if they have other stateful objects, or are of another
        number of ranks and an object does not say how it goes on then.
        """
        part = choose_part(parts, rank)
        self.state = dict(part.state) if part is not None else {}
        changed = len(parts) != size
        saved = [one.own["stateful"] for one in parts if one.own]
        if not saved:
            return
        names = {name for states in (saved if changed else [saved[rank]]) for name in states}
        problems = [f"it has no {name!r}" for name in self._stateful.keys() - names]
        problems += [f"the script has no {name!r}" for name in names - self._stateful.keys()]
        if problems:
            raise CheckpointMismatchError(
                "the checkpoint is of other objects in Checkpointer(stateful=…): "
                f"{'; '.join(sorted(problems))}; give the same names, or start again with --fresh"
            )
        fixed = [
            f"stateful[{name!r}] ({type(one).__name__})"
            for name, one in self._stateful.items()
            if not hasattr(one, "load_all_state_dicts")
        ]
        if changed and fixed:
            raise CheckpointMismatchError(
                f"the checkpoint was saved by {len(parts)} ranks, and the job has {size} now: "
                f"{', '.join(fixed)} cannot continue at another number. Continue with "
                f"{len(parts)} ranks; or give the object a method load_all_state_dicts(states, "
                "rank, world_size) that continues from the states of all ranks, as "
                "kdist_trainer.ShardedLoader has; or start again with --fresh"
            )
        for name, one in self._stateful.items():
            if changed:
                one.load_all_state_dicts([states[name] for states in saved], rank, size)
            else:
                one.load_state_dict(saved[rank][name])
        if part is not None:
            self._generators = part.own["generators"]
            self.restore_generators()

    def restore_generators(self) -> None:
        """Have the generators continue as they were saved; nothing without a resumed state."""
        if self._generators is not None:
            rng.restore_generators(self._generators)


def choose_part(parts: Sequence[Part], rank: int) -> Part | None:
    """The part of a rank: that of its number; None if there were fewer ranks."""
    return parts[rank] if rank < len(parts) else None


def report_change(parts: Sequence[Part], size: int) -> None:
    """Log what has no owner now, and which ranks begin without a part. Called on one rank."""
    if len(parts) == size:
        return
    changed = CHANGED.format("parts", len(parts), size)
    if len(parts) > size:
        left = "; ".join(
            f"rank {rank}: {''.join(f'state[{key!r}], ' for key in part.state)}random numbers"
            for rank, part in enumerate(parts[size:], start=size)
        )
        message = (
            f"{changed}. Without an owner: {left}. Checkpointer.saved_states has the states of all "
            "ranks; the next checkpoint has only those of the ranks that are there"
        )
    else:
        new = ", ".join(map(str, range(len(parts), size)))
        message = (
            f"{changed}. New: rank {new}, with an empty Checkpointer.state and random numbers as "
            "the script seeded them. Checkpointer.saved_states has the states of all ranks"
        )
    log.warn("rank-parts-changed", saved=len(parts), ranks=size, message=message)


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
    """Add the groups that the saved optimizer has beyond the script's, as it begins; returns how
    many. Their numbers are loaded later. The saved groups have the names of their parameters;
    `title` is the optimizer's, for the error. Raises `CheckpointMismatchError` if the groups differ
    otherwise; the message says what to do.
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


ALONE: Final = ""
"""The name of an object that is given alone."""
CHANGED: Final = "the checkpoint has {} of {} ranks, and now there are {}"
_RESERVED: Final = frozenset({"state", "param_groups"})

T = TypeVar("T")


class ScriptObjects:
    """What a script trains with."""

    def __init__(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        scheduler: StatefulObject | Mapping[str, StatefulObject] | None,
        scaler: StatefulObject | Mapping[str, StatefulObject] | None,
    ) -> None:
        """Name the objects; changes nothing. Raises `ConfigError` if a name cannot be used, or an
        object is of a kind that cannot be saved.
        """
        self._module = (
            model if isinstance(model, nn.Module) else _Modules(_named("model", model, nn.Module))
        )
        self.optimizers = _named("optimizer", optimizer, Optimizer)
        self.keepers: dict[str, dict[str, StatefulObject]] = {
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
        that it has unfrozen or frozen are so again. `notes` is what `describe` gave; empty in
        checkpoints of earlier versions. Raises `CheckpointMismatchError` if the groups of an
        optimizer cannot be those that were saved.
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
        """A state of the saved shape to be filled, by what `describe` gave and what the checkpoint
        has. Nothing changes.
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
            made = state.template(self._module, each, own | model, buffers=buffers)
            found["model"] = made["model"]
            return made["optimizer"]

        found["optimizer"] = _nest(self.optimizers, of_optimizer)
        for kind, keepers in self.keepers.items():
            if keepers:
                found[kind] = _nest(keepers, lambda *_: None)
        return found

    def load(self, notes: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Load what a `template` was filled with. Raises `CheckpointMismatchError` if it is of
        another model or optimizer.
        """
        problems = self.find_problems(notes, saved)
        if problems:
            raise state.StateMismatchError(problems)
        self._added.clear()
        names = self.names()
        optimizers = _flat(self.optimizers, saved["optimizer"])
        buffers = self._buffer_names(notes)
        state.load_module(self._module, saved["model"], buffers=buffers)
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
        problems = state.find_module_problems(self._module, saved["model"], buffers=buffers)
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

    def _buffer_names(self, notes: Mapping[str, Any]) -> state.BufferNames:
        return state.BufferNames(notes.get("absent_buffers", []), notes.get("made_buffers", []))


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


_MOST_SHOWN: Final = 8
_PROGRESS: Final = frozenset(
    {
        "last_epoch",
        "_step_count",
        "_last_lr",
        "_is_initial",
        "_get_lr_called_within_step",
        "_initial_step",
    }
)
"""What of a scheduler's state counts, and is no setting."""


def read_settings(objects: ScriptObjects) -> dict[str, Any]:
    """The settings by their path, such as `optimizer.param_groups[0].lr`, as JSON. Read before the
    training has begun.
    """
    found: dict[str, Any] = {}
    for path, value in _walk(objects):
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        try:
            found[path] = encode(value, path)[0]
        except UnloadableStateError:
            continue  # a function, for example, which nobody can compare
    return found


def find_edits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What differs between the settings of the script now and of the script that began the
    training, as sentences.
    """
    edits = [
        f"{path} was {saved[path]} and is {value} in the script"
        for path, value in own.items()
        if path in saved and saved[path] != value
    ]
    more = len(edits) - _MOST_SHOWN
    return [*edits[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def name_classes(objects: ScriptObjects) -> dict[str, str]:
    """The class of each object, by `optimizer` or `optimizer.NAME`."""
    every: dict[str, Mapping[str, Any]] = {"optimizer": objects.optimizers, **objects.keepers}
    return {
        f"{kind}.{name}".rstrip("."): type(one).__name__
        for kind, named in every.items()
        for name, one in named.items()
    }


def check_classes(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise `CheckpointMismatchError` if an object is of another class than the saved one."""
    problems = [
        f"{name} was {saved[name]} and is {kind}"
        for name, kind in own.items()
        if name in saved and saved[name] != kind
    ]
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint is of other classes: {'; '.join(problems)}. Use the same, or start "
            "again with --fresh"
        )


def _walk(objects: ScriptObjects) -> Iterator[tuple[str, Any]]:
    for name, optimizer in objects.optimizers.items():
        path = f"optimizer.{name}".rstrip(".")
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{path}.param_groups[{number}].{key}", value
    for kind, keepers in objects.keepers.items():
        for name, keeper in keepers.items():
            path = f"{kind}.{name}".rstrip(".")
            for key, value in keeper.state_dict().items():
                if key not in _PROGRESS:
                    yield f"{path}.{key}", value


_PARTS: Final = "ranks"
"""Name of the value that has what is no JSON of the parts of all ranks."""


class ScriptState:
    """Reads, shows and loads it."""

    def __init__(self, objects: ScriptObjects, stateful: Mapping[str, StatefulObject]) -> None:
        """Note the settings that the script begins with."""
        self.part = RankPart(stateful)
        self.shared_state: dict[Any, Any] = {}
        self.saved_states: list[dict[Any, Any]] = []
        self.resumed_step = 0
        self._objects = objects
        self._settings = read_settings(objects)

    def read(self, step: int, group: CheckpointGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        """The nested tensors and values, and what `state.json` has. Collective. Raises
        `UnloadableStateError` on every rank if a checkpoint cannot hold a value of one.
        """

        def read() -> tuple[Part, dict[Any, Any]]:
            encode(self.shared_state, "Checkpointer.shared_state")
            return self.part.read(), self.shared_state if group.is_rank_zero else {}

        parts = group.on_all_ranks(read)
        tensors = self._objects.read()
        # in a tuple, because a list would be taken apart
        tensors[_PARTS] = (tuple(part.own for part, _ in parts),)
        state = {
            "step": step,
            "states": [part.state for part, _ in parts],
            "shared_state": parts[0][1],
            "script": {
                **self._objects.describe(),
                "classes": name_classes(self._objects),
                "settings": self._settings,
            },
        }
        return tensors, state

    def show(self, found: LoadedCheckpoint | None, group: CheckpointGroup) -> int:
        """Let `state`, `shared_state` and `saved_states` be those of a checkpoint; returns its
        step, 0 without one.
        """
        if found is None:
            return 0
        parts = _read_parts(found.state, None, group.size)
        part = choose_part(parts, group.rank)
        self.part.state = dict(part.state) if part is not None else {}
        self._show_all(found.state, parts)
        return int(found.state.get("step", 0))

    def load(self, store: CheckpointManager, group: CheckpointGroup) -> int | None:
        """Load the newest checkpoint that verifies; returns its step, None if there is none.
        Collective. Raises `CheckpointMismatchError` if it is of another model, or none can be read.
        """
        filled: dict[str, Any] = {}

        def make(found: LoadedCheckpoint, index: SavedIndex) -> dict[str, Any]:
            notes = found.state.get("script", {})
            check_classes(notes.get("classes", {}), name_classes(self._objects))
            self._objects.prepare(notes)
            filled.clear()
            filled.update(self._objects.template(notes, describe_index(index)))
            if _PARTS in index:
                filled[_PARTS] = None
            return filled

        state = store.load(make, fingerprint="")
        if state is None:
            return None
        notes = state.get("script", {})
        self._objects.load(notes, filled)
        parts = _read_parts(state, filled.get(_PARTS), group.size)
        self._show_all(state, parts)
        self.part.load(parts, group.rank, group.size)
        self.resumed_step = int(state["step"])
        if group.is_rank_zero:
            report_change(parts, group.size)
            if edits := find_edits(notes.get("settings", {}), self._settings):
                log.warn(
                    "settings-edited",
                    message=(
                        f"the script was edited since it began this training: {'; '.join(edits)}. "
                        "The saved values win: to use the new ones, set them after "
                        "Checkpointer.resume()"
                    ),
                )
        log.event(
            "resumed",
            step=self.resumed_step,
            checkpoint=store.resumed.name if store.resumed else None,
        )
        return self.resumed_step

    def find_problems(self, state: Mapping[str, Any], kinds: Mapping[str, ValueKind]) -> list[str]:
        """Why `load` could not load what `read` gave, by what it asks for; empty if it can."""
        notes = self._objects.describe()
        asked = describe({**self._objects.template(notes, kinds), _PARTS: None})
        missing = [f"{name} is missing" for name in asked if name not in kinds]
        unasked = [f"{name} would not be asked for" for name in kinds if name not in asked]
        return [*missing, *unasked, *self._objects.find_problems(notes, state)]

    def _show_all(self, saved: Mapping[str, Any], parts: list[Part]) -> None:
        self.saved_states = [dict(part.state) for part in parts]
        self.shared_state = dict(saved.get("shared_state", {}))


def _read_parts(saved: Mapping[str, Any], own: Any, size: int) -> list[Part]:
    """The parts of all ranks; an earlier version has saved the state of rank 0 for all."""
    states = saved.get("states")
    if states is None:
        return [Part(saved.get("state", {}), {}) for _ in range(size)]
    owns = own[0] if own is not None else ({},) * len(states)
    return [Part(state, one) for state, one in zip(states, owns, strict=True)]
