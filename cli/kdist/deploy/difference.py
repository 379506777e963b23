"""What sending a job would change, as the server sees it: a rehearsed apply beside what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kdist.deploy.placing import Plan
from kdist.deploy.pruning import find_leftovers
from kdist.deploy.sending import send
from kdist.manifest import Manifest

if TYPE_CHECKING:
    from kdist.cluster import Cluster


@dataclass(frozen=True)
class Difference:
    """One object before (None: it is new) and after (None: it goes), without the server's own fields."""

    manifest: Manifest
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def lines(self) -> list[str]:
        """A unified diff of the two as YAML, with kubectl's headers; empty if nothing differs."""
        import difflib

        title = f"{self.manifest.kind}/{self.manifest.name}"
        old, new = self.text(self.before).splitlines(), self.text(self.after).splitlines()
        return list(difflib.unified_diff(old, new, f"live/{title}", f"merged/{title}", lineterm=""))

    @staticmethod
    def text(document: Mapping[str, Any] | None) -> str:
        """A document as YAML, its keys in one order; empty for None."""
        import yaml

        if document is None:
            return ""
        found: str = yaml.dump(dict(document), Dumper=_dumper(), sort_keys=True, allow_unicode=True, width=10_000)
        return found


@cache
def _dumper() -> Any:
    """A dumper that writes text of several lines line by line, so that a diff shows which of them differ."""
    import yaml

    class Lines(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # chosen when it runs
        """The dumper."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Lines.add_representer(str, represent)
    return Lines


def compare(cluster: Cluster, plan: Plan, *, force: bool = False) -> Iterator[Difference]:
    """Each object of the job that would be new, different or gone. Raises `KdistError` with all that the server would refuse."""
    from kdist.cluster import essence

    for manifest, applied in send(cluster, plan, dry_run=True, force=force):
        if applied.verb != "unchanged":
            before = None if applied.before is None else essence(applied.before)
            yield Difference(manifest, before, essence(applied.document))
    for manifest in find_leftovers(cluster, plan):
        yield Difference(manifest, essence(manifest.document), None)
