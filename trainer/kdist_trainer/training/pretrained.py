"""Pretrained weights (`train.init`): from a safetensors file or another run's checkpoint, which may
have been fetched from a URL, read by every rank or by rank 0 for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kdist_trainer import log
from kdist_trainer.checkpoint import export
from kdist_trainer.checkpoint.manifest import DamagedCheckpointError, parse_name
from kdist_trainer.config import NOT_FETCHED, Init
from kdist_trainer.config.sources import base_name
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup, Fetch, fill, send
from kdist_trainer.errors import CheckpointMismatchError, ConfigError, DataError
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.training.training_state import TrainingState

_MAX_PROBLEMS = 3
_WHOLE, _INDEX = "model.safetensors", ".index.json"  # Hugging Face's names


class SafetensorsFile:
    """A safetensors file; reading it runs no code."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def shapes(self) -> Mapping[str, torch.Size]:
        """The shape of every weight, by its full name. Raises `DataError`."""
        try:
            with safe_open(self._path, framework="pt", device="cpu") as file:
                return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise DataError(f"train.init: {self._path}: {error}") from error

    def fetch(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """These weights whole, on the CPU: never on the device that rank 0 trains with."""
        with safe_open(self._path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in names}


class SafetensorsShards:
    """A model in several safetensors files with an index, as Hugging Face writes large ones."""

    def __init__(self, index: Path) -> None:
        self._index = index
        self._files: dict[str, SafetensorsFile] = {}

    def shapes(self) -> Mapping[str, torch.Size]:
        return {
            name: size
            for file in self._open_files().values()
            for name, size in file.shapes().items()
        }

    def fetch(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        files, found = self._weight_map(), dict[str, Tensor]()
        for file in sorted({files[name] for name in names}):
            found |= self._open_files()[file].fetch([name for name in names if files[name] == file])
        return found

    def _weight_map(self) -> dict[str, str]:
        try:
            files = parse_json(self._index.read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"train.init: {self._index}: no index of safetensors files: {error}"
            ) from error
        if not isinstance(files, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in files.values()
        ):
            raise DataError(
                f"train.init: {self._index}: weight_map must name files next to the index"
            )
        return files

    def _open_files(self) -> dict[str, SafetensorsFile]:
        if not self._files:
            self._files = {
                file: SafetensorsFile(self._index.parent / file)
                for file in sorted(set(self._weight_map().values()))
            }
        return self._files


class CheckpointFolder:
    """The checkpoint folder of a run, of which the newest is used, or one checkpoint in it. It is
    verified first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._export: export.Export | None = None

    def shapes(self) -> Mapping[str, torch.Size]:
        found = self._open()
        return {name: found.entries[source].size for name, source in found.sources.items()}

    def fetch(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        return self._open().fetch(names)

    def _open(self) -> export.Export:
        if self._export is None:
            one = parse_name(self._path.name)
            try:
                self._export = export.prepare(
                    self._path.parent if one else self._path, step=one[1] if one else None
                )
            except (DamagedCheckpointError, CheckpointMismatchError, OSError) as error:
                raise DataError(f"train.init: {error}") from error
        return self._export


@dataclass(frozen=True)
class Pretrained:
    """Loads the weights that `train.init` names into one rank's model."""

    settings: Init
    mounts: Mapping[str, Path]
    broadcast: bool
    """Whether rank 0 reads and sends; otherwise every rank reads for itself."""
    training: TrainingState
    fetched: Path | None = None
    """The folder with what was fetched from the URL."""

    def load(self) -> None:
        """Load the weights into the model. Collective.

        Raises:
            DataError: If they cannot be read.
            ConfigError: If they were to be fetched, and nothing says where to.
            CheckpointMismatchError: If they do not match the model.
        """
        training, peers = self.training, CheckpointGroup(self.training.world)
        source = open_init(self.settings, self.mounts, self.fetched)
        tensors = training.strategy.state_dict(training.optimizer)
        own = {name: value for name, value in tensors["model"].items() if isinstance(value, Tensor)}
        available = peers.on_rank_zero(lambda: dict(source.shapes()))
        wanted = self._select(own, available)
        if self.broadcast:
            send(wanted, source.fetch, peers)
        else:
            peers.on_all_ranks(partial(_read, wanted, source.fetch))
        training.strategy.load_state_dict(tensors, training.optimizer)
        training.ema.reset()
        if training.world.is_rank_zero:
            log.event("pretrained-loaded", path=self.settings.source, weights=len(wanted))

    def _select(
        self, own: Mapping[str, Tensor], available: Mapping[str, torch.Size]
    ) -> dict[str, Tensor]:
        """The model's weights that the source has. Raises `CheckpointMismatchError` if it lacks
        some, or has them in another shape, and the job does not allow it.
        """
        first: dict[int, str] = {}  # files often store a tied parameter once
        first_names = {
            name: first.setdefault(id(one), name)
            for name, one in self.training.module.named_parameters(remove_duplicate=False)
        }
        held = {first_names.get(name, name) for name in available}
        problems = [
            f"{name} is missing"
            for name in own
            if name not in available and first_names.get(name, name) not in held
        ]
        problems += [
            f"{name} has shape {tuple(available[name])} in the source and {tuple(value.shape)} "
            "in the model"
            for name, value in own.items()
            if name in available and available[name] != value.shape
        ]
        if problems and (self.settings.strict == "on" or len(problems) == len(own)):
            more = (
                f" and {len(problems) - _MAX_PROBLEMS} more"
                if len(problems) > _MAX_PROBLEMS
                else ""
            )
            raise CheckpointMismatchError(
                f"train.init: {self.settings.source} is of another model: "
                f"{'; '.join(problems[:_MAX_PROBLEMS])}{more}"
            )
        if problems and self.training.world.is_rank_zero:
            log.warn(
                "pretrained-mismatch",
                path=self.settings.source,
                kept=problems[:100],
                message=f"{len(problems)} weights keep their initial values",
            )
        return {name: value for name, value in own.items() if available.get(name) == value.shape}


Source = SafetensorsFile | SafetensorsShards | CheckpointFolder


def open_init(settings: Init, mounts: Mapping[str, Path], fetched: Path | None) -> Source:
    """Open what `train.init` names: a path, below the mount paths of job.yaml, or a URL, of which
    `fetched` is the folder with what was fetched. Raises `ConfigError` if there is none.
    """
    if settings.path is not None:
        return open_source(settings.path, mounts)
    if fetched is None:
        raise ConfigError(f"train.init: {NOT_FETCHED.format(settings.source)}")
    name = base_name(settings.source)
    is_file = bool(name) and (fetched / name).is_file()
    return open_source(str(fetched / name if is_file else fetched), {})


def open_source(path: str, mounts: Mapping[str, Path]) -> Source:
    """Open `path`; one below a mount path of job.yaml is in the folder mounted on this machine."""
    found = Path(path)
    for mount, folder in sorted(mounts.items(), key=lambda one: -len(one[0])):
        if found.is_relative_to(mount):
            found = folder / found.relative_to(mount)
            break
    if found.is_dir():
        for name, kind in ((f"{_WHOLE}{_INDEX}", SafetensorsShards), (_WHOLE, SafetensorsFile)):
            if (found / name).is_file():
                return kind(found / name)
        return CheckpointFolder(found)
    return SafetensorsShards(found) if found.name.endswith(_INDEX) else SafetensorsFile(found)


def _read(wanted: Mapping[str, Tensor], fetch: Fetch) -> None:
    """Fill the tensors one by one, so that at most one of them is held twice."""
    for name, value in wanted.items():
        fill(value, fetch([name])[name])
