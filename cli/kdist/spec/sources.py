"""What a job fetches before its agents start: the data sets and the pretrained weights that its
file names by URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kdist.spec.bucket import scheme_of
from kdist.spec.data import DEFAULT_SIZE
from kdist.spec.violations import Violation
from kdist_trainer.config import SOURCE_SECRETS, SOURCE_VARIABLES
from kdist_trainer.config.source_url import HUB

if TYPE_CHECKING:
    from kdist.spec.training_job import Spec

MOST_SOURCES: Final = 16
"""A Job has at most 20 rules for exit codes, of which kdist needs one for each source."""
INIT_MOUNT: Final = "/run/kdist-init"
"""Where the pods find the weights of `train.init.url`."""
_MOST_PORT: Final = 65_535


@dataclass(frozen=True)
class FetchSource:
    """One thing to fetch.

    Attributes:
        name: `data-0` for `spec.data[0]`, `init` for `spec.train.init`; of its volume, too.
        field: the field of job.yaml, such as `spec.data[0]`.
        url: where it is.
        endpoint: address of the server; None for that of the URL or of the cloud.
        region: region of a bucket.
        secret: Secret on the cluster with the credentials.
        sha256: digest of the file, or of the file with the digests of all.
        size: most bytes that are fetched, as a quantity such as `10Gi`.
        mount: where the pods find it.
        path: the same data on this machine, which `kdist run` uses; None if it fetches.
        is_weights: whether only weights are fetched of a whole repository.
    """

    name: str
    field: str
    url: str
    endpoint: str | None
    region: str | None
    secret: str | None
    sha256: str | None
    size: str
    mount: str
    path: str | None = None
    is_weights: bool = False

    @property
    def scheme(self) -> str:
        """That of the URL, such as `s3`."""
        return scheme_of(self.url)

    @property
    def server(self) -> str | None:
        """The address of the server, of which the file names the port; None for that of a cloud."""
        return self.endpoint or (self.url if self.scheme in ("http", "https") else None)

    @property
    def moves(self) -> bool:
        """Whether another fetch may find something else under the same URL, which could be
        prevented: a repository without a revision.
        """
        found = HUB.fullmatch(self.url)
        return found is not None and found["revision"] is None and self.sha256 is None


def list_sources(spec: Spec) -> list[FetchSource]:
    """What the job fetches, in the order of the file."""
    found = [
        _read(data, f"data-{index}", f"spec.data[{index}]", mount=data.mount_path, path=data.path)
        for index, data in enumerate(spec.data)
        if data.url is not None
    ]
    init = None if spec.train is None else spec.train.init
    if init is not None and init.url is not None:
        found.append(_read(init, "init", "spec.train.init", mount=INIT_MOUNT, is_weights=True))
    return found


def _read(section: Any, name: str, field: str, **more: Any) -> FetchSource:
    names = ("url", "endpoint", "region", "secret", "sha256")
    given = {each: getattr(section, each) for each in names}
    return FetchSource(name=name, field=field, size=section.size or DEFAULT_SIZE, **given, **more)


def list_warnings(spec: Spec) -> list[str]:
    """What of the sources may surprise later."""
    return [
        f"{source.field}.url names no revision, so pods that start later may fetch other files; "
        "pin it: hf://OWNER/NAME@REVISION"
        for source in list_sources(spec)
        if source.moves
    ]


def check_sources(spec: Spec) -> Iterator[Violation]:
    """Their number, the ports of their servers, and the variables with credentials, which have one
    source each and are not written in the file.
    """
    sources = list_sources(spec)
    if len(sources) > MOST_SOURCES:
        message = (
            f"at most {MOST_SOURCES} URLs can be fetched, found {len(sources)}: put several data "
            "sets below one URL, or on a claim"
        )
        yield Violation(message, "data", ("data", "train.init"))
    for source in sources:
        yield from _check_port(source)
    yield from _check_variables(spec, sources)


def _check_port(source: FetchSource) -> Iterator[Violation]:
    if source.server is None:
        return
    field = _relative(source, "url" if source.endpoint is None else "endpoint")
    try:
        port = urlsplit(source.server).port
    except ValueError:
        port = 0
    if port == 0:
        yield Violation(f"must have a port from 1 to {_MOST_PORT}", field, (field,))


def _check_variables(spec: Spec, sources: list[FetchSource]) -> Iterator[Violation]:
    for index, variable in enumerate(spec.env):
        field = f"env.{index}.name"
        for source in sources:
            fields = (field, _relative(source, "url"), _relative(source, "secret"))
            where = f"{source.field.removeprefix('spec.')}.secret"
            if source.secret and variable.name in SOURCE_VARIABLES.get(source.scheme, ()):
                yield Violation(
                    f"`{variable.name}` comes from the Secret {source.secret} of {where}; remove "
                    "it here or there",
                    field,
                    fields,
                )
                break
            is_secret = variable.name in SOURCE_SECRETS.get(source.scheme, ())
            if variable.secret is None and is_secret:
                yield Violation(
                    f"`{variable.name}` is a credential of {source.field}, and many people can "
                    f"read a manifest: put it in a Secret and name that with {where}",
                    field,
                    fields,
                )
                break


def _relative(source: FetchSource, name: str) -> str:
    """A field of a source as violations name it, such as `data.0.url`."""
    place = source.field.removeprefix("spec.").replace("[", ".").replace("]", "")
    return f"{place}.{name}"
