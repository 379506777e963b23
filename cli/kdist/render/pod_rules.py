"""What the API server, or the kubelet of every node, refuses of the pod that `spec.podTemplate` has
been merged into: fields that exclude each other, of which mostly kdist has set one and the overlay
the other. No cluster is needed to know it: the rules are those of Kubernetes' own validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kdist.errors import KdistError
from kdist.spec.reference import show
from kdist.status import documents
from kdist.status.documents import Document
from kdist.units import parse_quantity

Path = tuple[str, ...]
Refused = tuple[tuple[Path, ...], str]
"""The places of what is refused, and of what it conflicts with, in the pod template, where items of
lists are known by their names; and why, with the fix.
"""

_HANDLERS: Final = ("exec", "grpc", "httpGet", "tcpSocket")
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")


def find_refused(pod: Document) -> Iterator[Refused]:
    """Everything that is refused of a pod template."""
    spec = documents.mapping(pod, "spec")
    top: Path = ("spec",)
    context = documents.mapping(spec, "securityContext")
    yield from _check_profile(context, (*top, "securityContext"))
    for volume in documents.items(spec, "volumes"):
        found = [key for key in volume if key != "name"]
        yield from _check_one_of(found, (*top, "volumes", str(volume.get("name"))), "a volume")
    for kind in ("initContainers", "containers"):
        for container in documents.items(spec, kind):
            place = (*top, kind, str(container.get("name")))
            if "image" not in container:
                yield (place,), "needs an image"
            yield from _check_security(container, spec, place)
            yield from _check_resources(container, spec, (*place, "resources"))
            yield from _check_parts(container, spec, place)


def _check_one_of(found: Sequence[str], place: Path, what: str) -> Iterator[Refused]:
    """What may be given in one way only. That of kdist comes first."""
    if len(found) > 1:
        fix = f"add {found[0]}: null, or remove {found[-1]}"
        message = f"{what} is given in one way, found {' and '.join(found)}: {fix}"
        yield ((*place, found[-1]),), message


def _check_profile(context: Document, place: Path) -> Iterator[Refused]:
    profile = documents.mapping(context, "seccompProfile")
    is_local, has_file = profile.get("type") == "Localhost", "localhostProfile" in profile
    if is_local != has_file:
        path = (*place, "seccompProfile", "type" if is_local else "localhostProfile")
        yield (path,), "needs localhostProfile if its type is Localhost, and else has none"


def _check_security(container: Document, spec: Document, place: Path) -> Iterator[Refused]:
    own, pod = (documents.mapping(each, "securityContext") for each in (container, spec))
    inside = (*place, "securityContext")
    yield from _check_profile(own, inside)
    if own.get("allowPrivilegeEscalation") is False:
        fix = (
            "while allowPrivilegeEscalation is false, which kdist sets: add "
            "allowPrivilegeEscalation: true"
        )
        if own.get("privileged") is True:
            yield ((*inside, "privileged"),), f"must not be true {fix}"
        elif "CAP_SYS_ADMIN" in documents.texts(own, "capabilities", "add"):
            yield ((*inside, "capabilities", "add"),), f"must not have CAP_SYS_ADMIN {fix}"
    user = own.get("runAsUser", pod.get("runAsUser"))
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is True and user == 0 and user is not False:
        yield (
            ((*inside, "runAsUser"), ("spec", "securityContext", "runAsUser")),
            f"must not be 0 while runAsNonRoot is true, which kdist sets: no node starts the "
            f"container {place[-1]}; add runAsNonRoot: false to its securityContext",
        )


def _check_resources(container: Document, spec: Document, place: Path) -> Iterator[Refused]:
    given = {kind: documents.mapping(container, "resources", kind) for kind in _KINDS}
    for name in dict.fromkeys([*given["requests"], *given["limits"]]):
        paths = tuple((*place, kind, name) for kind in _KINDS)
        amounts = []
        for kind, path in zip(_KINDS, paths, strict=True):
            amounts.append(parse_quantity(given[kind].get(name)))
            if name in given[kind] and amounts[-1] is None:
                yield (path,), "must be a quantity such as 500m, 2 or 4Gi"
        request, limit = amounts
        if request is None:
            continue
        # what nodes do not give to more than one pod at once
        is_whole = ("/" in name and "kubernetes.io/" not in name) or name.startswith("hugepages-")
        if is_whole and request != limit:
            yield paths, f"needs a request and a limit of {name} that are equal"
        elif limit is not None and request > limit:
            found = " and ".join(f"{kind} {given[kind][name]}" for kind in _KINDS)
            fix = f"; spec.resources.{name} sets both" if name in ("cpu", "memory") else ""
            yield paths, f"must not request more than the limit, found {found}{fix}"
    known = {each.get("name") for each in documents.items(spec, "resourceClaims")}
    for claim in documents.items(container, "resources", "claims"):
        if claim.get("name") not in known:
            message = f"there is no claim {claim.get('name')} in podTemplate.spec.resourceClaims"
            yield ((*place, "claims"),), message


_KINDS: Final = ("requests", "limits")


def _check_parts(container: Document, spec: Document, place: Path) -> Iterator[Refused]:
    """The variables, mounts and probes of a container."""
    for variable in documents.items(container, "env"):
        found = [key for key in variable if key != "name" and variable[key]]
        yield from _check_one_of(found, (*place, "env", str(variable.get("name"))), "a variable")
    volumes = {each.get("name") for each in documents.items(spec, "volumes")}
    for mount in documents.items(container, "volumeMounts"):
        if mount.get("name") not in volumes:
            path = (*place, "volumeMounts", str(mount.get("mountPath")), "name")
            message = f"there is no volume {mount.get('name')}: add it to podTemplate.spec.volumes"
            yield (path,), message
    for probe in _PROBES:
        found = [key for key in documents.mapping(container, probe) if key in _HANDLERS]
        yield from _check_one_of(found, (*place, probe), "a probe")


class PodTemplateError(KdistError):
    """Kubernetes refuses what `spec.podTemplate` makes of the pod: `problems` has for each of them
    its place in the job file, and what is wrong there.
    """

    def __init__(self, problems: Sequence[tuple[tuple[str | int, ...], str]]) -> None:
        super().__init__(
            "; ".join(f"{show(path)}: {message}" for path, message in problems),
            hint="`kdist validate` shows the lines, `kdist render --annotate` the pod",
        )
        self.problems = problems


def check_pod(pod: Document, overlay: Any, keys: Mapping[str, str]) -> None:
    """Raise `PodTemplateError` with everything that is refused of a pod that the overlay has been
    merged into. `keys` has for each list the field by which its items are known.
    """
    refused = [
        (("spec", "podTemplate", *_locate(overlay, paths, keys)), message)
        for paths, message in find_refused(pod)
    ]
    if refused:
        raise PodTemplateError(refused)


def _locate(overlay: Any, paths: Sequence[Path], keys: Mapping[str, str]) -> tuple[str | int, ...]:
    """The path in the overlay that reaches furthest of these of the pod."""
    found: list[tuple[str | int, ...]] = []
    for path in paths:
        place, value, key = list[str | int](), overlay, ""
        for part in path:
            if isinstance(value, Mapping) and part in value:
                place.append(part)
                value, key = value[part], keys.get(part, "")
            elif isinstance(value, list):
                names = [str(item.get(key)) for item in value if isinstance(item, Mapping)]
                if part not in names:
                    break
                place.append(names.index(part))
                value = value[names.index(part)]
            else:
                break
        found.append(tuple(place))
    return max(found, key=len)
