"""The rules of single fields: reserved names of environment variables and reserved mount paths."""

from __future__ import annotations

from collections.abc import Iterator

from kdist_trainer.config.violations import RULE, Violation, refuse

__all__ = ["RULE", "Violation", "check_mount", "check_variable", "refuse"]

# Set for the ranks by torch's elastic agent and kdist; a job that sets them would break its own
# rendezvous.
_RESERVED_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_RESERVED_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_RESERVED_PREFIXES = ("KDIST_", "TORCHELASTIC_")


def check_variable(name: str) -> Iterator[Violation]:
    """Check that kdist does not set a variable of this name itself."""
    if name in _RESERVED_RANKS + _RESERVED_SIZES or name.startswith(_RESERVED_PREFIXES):
        yield Violation(f"`{name}` is set by kdist itself and cannot be changed", "name", ("name",))


# Folders of the image itself, and those that kdist mounts.
_SYSTEM_FOLDERS = (
    "bin",
    "boot",
    "dev",
    "etc",
    "kdist",
    "lib",
    "lib64",
    "proc",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr",
)
_KDIST_FOLDERS = ("checkpoints", "code")


def check_mount(path: str) -> Iterator[Violation]:
    """Check that a mount path is normalized and outside of the folders of the system and kdist."""
    parts = path.split("/")[1:]
    if {"..", ".", ""} & set(parts):
        yield Violation("must not contain `.`, `..` or `//`", "mountPath", ("mountPath",))
    elif parts[0] in _SYSTEM_FOLDERS:
        yield Violation(
            f"must not be in /{parts[0]}, which belongs to the system", "mountPath", ("mountPath",)
        )
    elif parts[0] in _KDIST_FOLDERS or path.startswith("/var/run"):
        yield Violation(
            "must not be where kdist itself mounts a volume", "mountPath", ("mountPath",)
        )
