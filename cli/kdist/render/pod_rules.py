"""What the API server, or the kubelet of every node, refuses of the pod that `spec.podTemplate` has
been merged into: fields that exclude each other, of which mostly kdist has set one and the overlay
the other. No cluster is needed to know it: the rules are those of Kubernetes' own validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


_MAPPINGS: Final = {
    *("metadata", "spec", "labels", "annotations", "nodeSelector", "os", "valueFrom", "lifecycle"),
    *("securityContext", "capabilities", "seccompProfile", "appArmorProfile", "seLinuxOptions"),
    *("windowsOptions", "affinity", "nodeAffinity", "podAffinity", "podAntiAffinity"),
    *("resources", "limits", "requests", "preStop", "postStart", *_HANDLERS, *_PROBES),
}
_LISTS: Final = {"envFrom", "claims", "resourceClaims", "sysctls", "tolerations"}
"""Lists of mappings, besides those that are merged by names."""
_TEXTS: Final = {"add", "args", "command", "drop"}
_OPEN: Final = {"labels", "annotations", "nodeSelector", "limits", "requests", "volumeAttributes"}
"""Mappings of which the user chooses the keys: none of them is a field."""


def find_malformed(
    overlay: Any, keys: Mapping[str, str], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The places of values in an overlay that are not of their field's kind, and what is wrong
    there. Null, which removes a field, is none of them, except as an item of a list.
    """
    for name, value in overlay.items() if isinstance(overlay, Mapping) else ():
        place, is_list = (*path, name), name in keys or name in _LISTS or name in _TEXTS
        found = value if isinstance(value, list) else []
        if value is not None and (is_list or name in _MAPPINGS):
            expected = "a list" if is_list else "a mapping"
            if kind_of(value) != expected:
                yield place, tell_kind(expected, value)
                continue
        for index, item in enumerate(found):
            inside, key = (*place, index), keys.get(name)
            if name in _TEXTS:
                if not isinstance(item, str):
                    yield inside, "must be a text: put it in quotation marks"
            elif is_list and not isinstance(item, Mapping):
                yield inside, tell_kind("a mapping", item)
            elif key and (type(item.get(key)) not in (str, int)):
                yield inside, f"needs its {key}, by which it is merged"
            yield from find_malformed(item, keys, inside)
        if name not in _OPEN:
            yield from find_malformed(value, keys, place)


def kind_of(value: Any) -> str:
    """What a value is, in the words of an error."""
    if isinstance(value, Mapping):
        return "a mapping"
    return "null" if value is None else "a list" if isinstance(value, list) else "a value"


def tell_kind(expected: str, value: Any) -> str:
    """The error of a value that is not what is expected there."""
    return f"must be {expected}, found {kind_of(value)}"


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
    known = [each.get("name") for each in documents.items(spec, "resourceClaims")]
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
    volumes = [each.get("name") for each in documents.items(spec, "volumes")]
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

    def __init__(self, found: Iterable[tuple[tuple[str | int, ...], str]]) -> None:
        problems = [(("spec", "podTemplate", *path), message) for path, message in found]
        super().__init__(
            "; ".join(f"{show(path)}: {message}" for path, message in problems),
            hint="`kdist validate` shows the lines, `kdist render --annotate` the pod",
        )
        self.problems = problems


def check_pod(pod: Document, overlay: Any, keys: Mapping[str, str]) -> None:
    """Raise `PodTemplateError` with everything that is refused of a pod that the overlay has been
    merged into. `keys` has for each list the field by which its items are known.
    """
    refused = [(_locate(overlay, paths, keys), message) for paths, message in find_refused(pod)]
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
