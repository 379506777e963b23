"""The rules of the Pod Security Standard "restricted" as of Kubernetes 1.37, checked without a
cluster.

The rendered pod meets all of them; `spec.podTemplate` may violate them, and then a namespace that
enforces them rejects every pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

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
    rules = (
        (_container,)
        if (spec.get("os") or {}).get("name") == "windows"
        else (_container, _confinement)
    )
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
    if (context.get("seccompProfile") or {}).get("type", "RuntimeDefault") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield "seccompProfile must be RuntimeDefault or Localhost"
    if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield "appArmorProfile must be RuntimeDefault or Localhost"
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
    for probe in _probes(container):
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


def _probes(container: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    hooks = container.get("lifecycle") or {}
    names = ("livenessProbe", "readinessProbe", "startupProbe")
    yield from (container[name] for name in names if container.get(name))
    yield from (hooks[name] for name in ("postStart", "preStop") if hooks.get(name))
