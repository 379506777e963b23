"""What a job fetches before its agents start: the data sets, the pretrained weights, the code and
the wheels that its file names by URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kdist.spec.models import Violation, scheme_of
from kdist_trainer.config import CREDENTIAL_VARIABLES, SECRET_VARIABLES
from kdist_trainer.config.base import count_bytes
from kdist_trainer.config.sources import DEFAULT_SIZE, HUB, UrlSource

if TYPE_CHECKING:
    from kdist.spec.models import EnvVar
    from kdist.spec.training_job import Spec

MOST_SOURCES: Final = 16
"""A Job has at most 20 rules for exit codes, of which kdist needs one for each source."""
INIT_MOUNT: Final = "/run/kdist-init"
"""Where the pods find the weights of `train.init.url`."""
CODE_MOUNT: Final = "/code"


@dataclass(frozen=True)
class FetchSource:
    """One thing to fetch.

    Attributes:
        name: `data-0` for `spec.data[0]`, `init` for `spec.train.init`, `code`, `wheels`; of its
            volume, too.
        field: the field of job.yaml, such as `spec.data[0]`.
        url: where it is.
        endpoint: address of the server; None for that of the URL or of the cloud.
        region: region of a bucket.
        secret: Secret on the cluster with the credentials.
        sha256: digest of the file, or of the file with the digests of all.
        size: most bytes that are fetched, as a quantity such as `10Gi`.
        mount: where the pods find it; empty for wheels, which are fetched where they are installed.
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
    def is_unpinned(self) -> bool:
        """Whether a later fetch may find other files, because the URL of a repository names no
        revision.
        """
        found = HUB.fullmatch(self.url)
        return found is not None and found["revision"] is None and self.sha256 is None

    def arguments(self) -> Iterator[tuple[str, str]]:
        """The arguments of `python -m kdist_trainer.fetch` that come from the file, each with the
        name of its field.
        """
        yield "url", f"--url={self.url}"
        yield "url", f"--field={self.field}"
        for name in ("endpoint", "region", "sha256"):
            if (value := getattr(self, name)) is not None:
                yield name, f"--{name}={value}"
        yield "size", f"--max-bytes={count_bytes(self.size)}"
        if self.is_weights:
            yield "url", "--weights"


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
    if spec.code is not None and spec.code.url is not None:
        found.append(_read(spec.code, "code", "spec.code", mount=CODE_MOUNT))
    wheels = None if spec.install is None else spec.install.wheels
    if wheels is not None and wheels.url is not None:  # of which `kdist run` has no use
        found.append(_read(wheels, "wheels", "spec.install.wheels", mount="", path=""))
    return found


def _read(section: UrlSource, name: str, field: str, **more: Any) -> FetchSource:
    names = ("url", "endpoint", "region", "secret", "sha256")
    given: dict[str, Any] = {each: getattr(section, each) for each in names}
    return FetchSource(name=name, field=field, size=section.size or DEFAULT_SIZE, **given, **more)


def list_unpinned(spec: Spec) -> list[str]:
    """A warning for each source that may have other files later."""
    return [
        f"{source.field}.url names no revision, so pods that start later may fetch other files; "
        "pin it: hf://OWNER/NAME@REVISION"
        for source in list_sources(spec)
        if source.is_unpinned
    ]


def check_sources(spec: Spec) -> Iterator[Violation]:
    """Check the number of sources, which `MOST_SOURCES` limits."""
    if (count := len(list_sources(spec))) > MOST_SOURCES:
        message = (
            f"at most {MOST_SOURCES} URLs can be fetched, found {count}: put several data "
            "sets below one URL, or on a claim"
        )
        yield Violation(message, "data", ("data", "train.init"))


def check_credentials(spec: Spec) -> Iterator[Violation]:
    """Check that credentials of buckets and of what is fetched have one source each, and that none
    is written in the file.
    """
    places = [
        (each.field.removeprefix("spec."), each.scheme, each.secret) for each in list_sources(spec)
    ]
    if spec.checkpoints is not None and spec.checkpoints.url is not None:
        places.insert(0, ("checkpoints", spec.checkpoints.scheme, spec.checkpoints.secret))
    for index, variable in enumerate(spec.env):
        problems = (_find_credential(variable, *place) for place in places)
        if found := next(filter(None, problems), None):
            message, place = found
            field = f"env.{index}.name"
            dotted = place.replace("[", ".").replace("]", "")
            yield Violation(message, field, (field, f"{dotted}.url", f"{dotted}.secret"))


def _find_credential(
    variable: EnvVar, place: str, scheme: str, secret: str | None
) -> tuple[str, str] | None:
    """What is wrong with a variable that is a credential of a place, and the place."""
    name = variable.name
    if secret is not None and name in CREDENTIAL_VARIABLES.get(scheme, ()):
        return (
            f"`{name}` comes from the Secret {secret} of {place}.secret; remove it here or there",
            place,
        )
    if variable.secret is None and name in SECRET_VARIABLES.get(scheme, ()):
        return (
            f"`{name}` is a credential for {place}.url, and many people can read a manifest: put "
            f"it in a Secret and name that with {place}.secret",
            place,
        )
    return None
