"""The shipped workloads, one module each, named as in job.yaml; and the import of a user's own
class.

`digits` is handwritten digits and a small network, `gpt` a GPT that every strategy
can train. Both are examples of the public API in `kdist_trainer.workload` and use nothing else of
the trainer. `load` takes a name from here, or `module:Class` of the user's code.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from types import ModuleType

from kdist_trainer.errors import ConfigError
from kdist_trainer.workload import Workload


def shipped() -> list[str]:
    """Names of the workloads in this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> type[Workload]:
    """Load the class that `train.workload` names: a shipped one, or `module:Class` from the image
    or from `code`. Raises `ConfigError` if there is no such class, or it is not a complete
    workload. What the user's module raises while it is imported is raised unchanged.
    """
    if ":" not in name:
        if name not in shipped():
            raise ConfigError(
                f"train.workload: there is no workload {name!r}{_hint(name, shipped())}; "
                "write module:Class for yours"
            )
        module = importlib.import_module(f"{__name__}.{name}")
        classes: list[type[Workload]] = [vars(module)[each] for each in _classes(module)]
        return next(each for each in classes if each.__module__ == module.__name__)
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing_name = error.name or ""
        if not missing_name or not f"{module_name}.".startswith(f"{missing_name}."):
            raise  # the module exists, and imports one that does not
        raise ConfigError(
            f"train.workload: there is no module {missing_name!r}: put it into `code`, or "
            "install it in the image"
        ) from None
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(
            f"train.workload: {module_name} ({module.__file__}) has no class "
            f"{class_name!r}{_hint(class_name, _classes(module))}"
        )
    if not (inspect.isclass(found) and issubclass(found, Workload)):
        raise ConfigError(
            f"train.workload: {name} is not a class derived from kdist_trainer.workload.Workload"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"train.workload: {name} lacks {', '.join(missing)}")
    return found


def _classes(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Workload) and value is not Workload
    ]


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f", did you mean {near[0]!r}?"
    return f" (there are: {', '.join(known)})" if known else ""
