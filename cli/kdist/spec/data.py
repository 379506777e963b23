"""The section `spec.data[]` of job.yaml: a data set on a volume, at a URL, or on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import Field, model_validator

from kdist.spec.models import FolderPath, MountPath, ObjectName
from kdist.spec.violations import Violation, check_mount, refuse
from kdist_trainer.config.source import UrlSource

NO_SOURCE: Final = "needs a claim, a url, or a path on this machine"
TWO_SOURCES: Final = "excludes claim; keep one"


class Data(UrlSource):
    """One data set that every rank can read."""

    claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim with the data on a cluster."
    )
    path: FolderPath | None = Field(
        None, description="Path of the same data on this machine, for `kdist run`."
    )
    mount_path: MountPath = Field(description="Path at which the data is mounted on a cluster.")

    @model_validator(mode="after")
    def _has_a_source(self) -> Data:
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        if self.claim is None and self.path is None and self.url is None:
            yield Violation(NO_SOURCE, "", ("claim", "url", "path"))
        if self.claim is not None and self.url is not None:
            yield Violation(TWO_SOURCES, "url", ("claim", "url"))
        yield from check_mount(self.mount_path)
        yield from self.check_source()
