"""Merges `spec.podTemplate` into the rendered pod template by Kubernetes' strategic merge, and
rejects changes of what kdist requires.

Mappings are merged, null removes a field, lists of named items are merged by their names, required
terms of affinity are added and all other lists are replaced. The training's container is called
`trainer` here whatever the workload kind calls it.

It also checks the rules of the Pod Security Standard "restricted" as of Kubernetes 1.37, without
a cluster. The rendered pod meets all of them; `spec.podTemplate` may violate them, and then a
namespace that enforces them rejects every pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kdist.backends import Backend
from kdist.errors import KdistError
from kdist.render.pod_rules import PodTemplateError, check_pod, find_malformed, kind_of, tell_kind
from kdist.render.templates import TracedValue, trace_value, untrace
from kdist.spec.validators import OWN_KEYS, TRAINER
from kdist.status import FETCHER

OVERLAY: Final = "spec.podTemplate"
"""The field that the values of the overlay are traced to."""
MERGE_KEYS: Final = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_ADDED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
"""A list of which all items hold, so that those of the overlay come in addition."""
_OWN_FIELDS: Final = {
    "restartPolicy": "belongs to the workload kind",
    "serviceAccountName": "is spec.serviceAccountName",
    "terminationGracePeriodSeconds": "is the field of the same name of spec",
}
_OWN_VOLUMES: Final = ("config", "token", "checkpoints", "code", "install")


def merge_overlay(
    pod: dict[str, Any], overlay: Mapping[str, Any], backend: Backend
) -> dict[str, Any]:
    """The pod template with the overlay merged into it. Raises `KdistError` with all invalid
    changes, `PodTemplateError` if Kubernetes refuses the result.
    """
    if not overlay:
        return pod
    unknown = [key for key in overlay if key not in ("metadata", "spec")]
    if unknown:
        raise KdistError(
            f"{OVERLAY} takes metadata and spec, found {', '.join(map(repr, unknown))}",
            hint="it is merged into a pod template: podTemplate: {spec: {…}}",
        )
    if directives := list(_find_directives(overlay, OVERLAY)):
        raise KdistError(
            f"podTemplate does not support directives of a strategic merge patch: "
            f"{', '.join(directives)}",
            hint=(
                "null removes a field; lists of named items are merged by their names, "
                "all other lists are replaced"
            ),
        )
    if malformed := list(find_malformed(overlay, MERGE_KEYS)):
        raise PodTemplateError(malformed)
    overlay = _with_container_name(overlay, backend)
    merged = _merge(pod, overlay, ())
    before, after = (dict(_contract(each, backend.container)) for each in (pod, merged))
    broken = [
        f"{OVERLAY} must not change {part}"
        for part, value in before.items()
        if after.get(part) != value
    ]
    if broken:
        raise KdistError(
            "; ".join(broken),
            hint=("kdist requires these; `kdist render --annotate` shows where they come from"),
        )
    check_pod(untrace(merged, {}), overlay, MERGE_KEYS)
    found: dict[str, Any] = merged
    return found


def _find_directives(overlay: Any, path: str) -> Iterator[str]:
    """Paths of `$patch`, `$retainKeys` and the like; no pod field starts with `$`."""
    if isinstance(overlay, Mapping):
        yield from (f"{path}.{key}" for key in overlay if str(key).startswith("$"))
        for key, value in overlay.items():
            yield from _find_directives(value, f"{path}.{key}")
    elif isinstance(overlay, list):
        for index, value in enumerate(overlay):
            yield from _find_directives(value, f"{path}[{index}]")


def _with_container_name(overlay: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    spec = overlay.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(containers, list):
        return dict(overlay)
    renamed = [
        {**each, "name": backend.container}
        if isinstance(each, Mapping) and each.get("name") == TRAINER
        else each
        for each in containers
    ]
    return {**overlay, "spec": {**spec, "containers": renamed}}


def _merge(old: Any, new: Any, path: tuple[str | int, ...]) -> Any:
    """`new`, which is at this path of podTemplate, merged into `old`. The leaves of `new` are
    traced to podTemplate.
    """
    if isinstance(new, Mapping) and isinstance(old, dict | None):
        merged = dict(old or {})
        for key, value in new.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = _merge(merged.get(key), value, (*path, key))
        return merged
    if isinstance(new, list) and isinstance(old, list) and path[-1] in MERGE_KEYS:
        return _merge_named(old, new, path)
    if isinstance(new, list) and isinstance(old, list) and path[-1] == _ADDED:
        return [*old, *trace_value(new, OVERLAY)]
    if old is not None and kind_of(old) != kind_of(new):
        raise PodTemplateError([(path, tell_kind(kind_of(old), new))])
    return trace_value(new, OVERLAY)


def _merge_named(old: list[Any], new: list[Any], path: tuple[str | int, ...]) -> list[Any]:
    key = MERGE_KEYS[str(path[-1])]
    merged = list(old)
    for place, item in enumerate(new):
        name = item[key]
        names = [plain(each.get(key)) for each in merged]
        if name not in names:
            given = {part: value for part, value in item.items() if value is not None}
            merged.append(trace_value(given, OVERLAY))
        else:
            index = names.index(name)
            rest = {part: value for part, value in item.items() if part != key}
            merged[index] = _merge(merged[index], rest, (*path, place))
    return merged


def plain(marked: Any) -> Any:
    """A value without the field that it is traced to."""
    return marked.value if isinstance(marked, TracedValue) else marked


def _contract(pod: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """What other parts of kdist require of the pod: descriptions for errors, and values."""
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    for kind in ("labels", "annotations"):
        for key, value in (metadata.get(kind) or {}).items():
            if (
                not isinstance(value, TracedValue)
                or value.source == "metadata.name"
                or key.startswith(OWN_KEYS)
            ):
                yield f"metadata.{kind}.{key}", value
    for field, reason in _OWN_FIELDS.items():
        yield f"spec.{field}, which {reason}", spec.get(field)
    for volume in spec.get("volumes") or ():
        if volume["name"] in _OWN_VOLUMES:
            yield f"the volume {volume['name']}", volume
    container: Mapping[str, Any] = next(
        (each for each in spec.get("containers") or () if each["name"] == name), {}
    )
    yield "the container's args: change the job's own fields instead", container.get("args")
    yield (
        "terminationMessagePath, where the exit record is written",
        container.get("terminationMessagePath"),
    )
    for variable in container.get("env") or ():
        if str(plain(variable["name"])).startswith("KDIST_"):
            yield f"the variable {plain(variable['name'])}", variable
    for mount in container.get("volumeMounts") or ():
        if not isinstance(mount["mountPath"], TracedValue) or mount["mountPath"].source != OVERLAY:
            yield f"the mount at {plain(mount['mountPath'])}", mount
    for fetcher in spec.get("initContainers") or ():
        if (init := str(plain(fetcher["name"]))).startswith(FETCHER):
            part = f"the args of {init}: change the job's own fields instead"
            yield part, (fetcher.get("command"), fetcher.get("args"))
    for port in container.get("ports") or ():
        if port.get("name") == "metrics":
            yield "the port metrics", port


_VOLUMES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_SYSCTLS: Final = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_notsent_lowat",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_slow_start_after_idle",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
_SELINUX: Final = frozenset(
    {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
)
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"


def violations(template: Mapping[str, Any]) -> list[str]:
    """The violations of "restricted" by a pod template; one sentence each."""
    spec, metadata = template.get("spec") or {}, template.get("metadata") or {}
    found = [*_pod(spec), *_annotations(metadata.get("annotations") or {})]
    pod_context = spec.get("securityContext") or {}
    # Kubernetes rejects these fields in Windows pods, so "restricted" does not require them there.
    windows = (spec.get("os") or {}).get("name") == "windows"
    rules = (_container,) if windows else (_container, _confinement)
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind) or ():
            where = f"container {container.get('name')}"
            found += [f"{where}: {each}" for rule in rules for each in rule(container, pod_context)]
    return found


def _pod(spec: Mapping[str, Any]) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is not allowed"
    for volume in spec.get("volumes") or ():
        for kind in sorted(volume.keys() - _VOLUMES - {"name"}):
            yield f"volume {volume.get('name')}: {kind} is not allowed"
    context = spec.get("securityContext") or {}
    for sysctl in context.get("sysctls") or ():
        if sysctl.get("name") not in _SYSCTLS:
            yield f"the sysctl {sysctl.get('name')} is not allowed"
    yield from _context(context)


def _annotations(annotations: Mapping[str, Any]) -> Iterator[str]:
    for key, value in annotations.items():
        if key.startswith(_APPARMOR) and not (
            value in ("", "runtime/default") or str(value).startswith("localhost/")
        ):
            yield f"the AppArmor profile {value} is not allowed"


def _context(context: Mapping[str, Any]) -> Iterator[str]:
    """The rules for the security context of both pods and containers."""
    if context.get("runAsUser") == 0:
        yield "runAsUser must not be 0"
    allowed = ("RuntimeDefault", "Localhost")
    for profile in ("seccompProfile", "appArmorProfile"):
        if (context.get(profile) or {}).get("type", allowed[0]) not in allowed:
            yield f"{profile} must be RuntimeDefault or Localhost"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type", "") not in _SELINUX or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions may only name a type of containers"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "hostProcess is not allowed"


def _container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    yield from _context(own)
    if own.get("privileged"):
        yield "privileged is not allowed"
    if own.get("procMount", "Default") != "Default":
        yield "procMount must be Default"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot must be true"
    for port in container.get("ports") or ():
        if port.get("hostPort"):
            yield f"hostPort {port['hostPort']} is not allowed"
    probes = [container.get(f"{name}Probe") for name in ("liveness", "readiness", "startup")]
    hooks = container.get("lifecycle") or {}
    for probe in filter(None, [*probes, hooks.get("postStart"), hooks.get("preStop")]):
        if any((probe.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield "probes and hooks must not name a host"


def _confinement(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    """The rules for Linux containers only."""
    own = container.get("securityContext") or {}
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation must be false"
    if not (own.get("seccompProfile") or pod.get("seccompProfile")):
        yield "seccompProfile must be set"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        yield "capabilities must drop ALL"
    for added in capabilities.get("add") or ():
        if added != "NET_BIND_SERVICE":
            yield f"the capability {added} is not allowed"
