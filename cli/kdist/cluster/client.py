"""`Cluster`: a connection to a Kubernetes API server, made by `connect`, and the requests on one
object: get, and those that change it, `send_…`. The objects of a job are changed through
`JobObjects` only, which checks them first. A cluster may not serve TrainingJobs, or not show them
to the user.

A change contains the uid and resourceVersion of the object that was read. If the object has changed
since, the API server answers 409, and the object is read and changed again. The normalized form of
an object shows whether a server-side apply has changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from kdist.cluster import kubeconfig, resources
from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.kubeconfig import Impersonation
from kdist.cluster.streams import PodStreams
from kdist.cluster.transport import READ_SECONDS, ApiRequest, ApiResponse, Transport
from kdist.cluster.watch import ObjectLists
from kdist.manifest import Manifest

Document = dict[str, Any]


# Metadata that the server sets.
_SERVER_SET = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink"}
)


Verb = Literal["created", "configured", "unchanged"]


@dataclass(frozen=True)
class Applied:
    """Result of a server-side apply.

    Attributes:
        document: the object as the server has it now.
        verb: what was done.
        before: the object as it was; None if it is new.
        warnings: of the server.
    """

    document: Document
    verb: Verb
    before: Document | None = None
    warnings: tuple[str, ...] = ()


def normalize(document: Mapping[str, Any]) -> Document:
    """The object without status and server-set metadata. Objects that are equal in this form are
    the same to their user.
    """
    metadata = {
        key: value for key, value in document.get("metadata", {}).items() if key not in _SERVER_SET
    }
    return {key: value for key, value in document.items() if key != "status"} | {
        "metadata": metadata
    }


_ATTEMPTS = 5  # attempts; controllers write objects between our read and our write
_IDENTITY = ("uid", "resourceVersion")
_UNREADABLE = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
# If the object does not exist, an apply creates it whatever version it contains. An object that
# somebody creates in the meantime never has version 1, which etcd has before its first write: the
# apply then gets 409, and the object is read.
ABSENT = {"metadata": {"resourceVersion": "1"}}
T = TypeVar("T")


def identify(seen: Mapping[str, Any]) -> dict[str, Any]:
    """The uid and resourceVersion of an object; those that it has."""
    return {key: seen["metadata"][key] for key in _IDENTITY if key in seen["metadata"]}


def guard(body: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """Add the uid and resourceVersion of `seen` to `body`: the server answers 409 if the object
    has changed since.
    """
    return {**body, "metadata": {**(body.get("metadata") or {}), **identify(seen)}}


def retry_on_conflict(send: Callable[[], T]) -> T:
    """Call `send`, which reads and changes an object, and repeat it if somebody else has changed
    the object in between. Raises `ApiError` after the last attempt.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            return send()
        except ApiError as error:
            if error.status != 409 or error.owners or not left:
                raise
    raise AssertionError


FIELD_MANAGER = "kdist"


class Objects(ObjectLists):
    """The objects of one cluster.

    Every method names objects by `api_version`, `kind`, `name` and `namespace` (None for the
    connection's own). Empty selectors match everything. All raise `ApiError` if the server rejects
    the request, and `KdistError` (UNREACHABLE) if it cannot be reached.
    """

    def __init__(
        self, transport: Transport, namespace: str, *, field_manager: str = FIELD_MANAGER
    ) -> None:
        super().__init__(transport, namespace)
        self.field_manager = field_manager

    def get(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Document:
        """Fetch an object, or a subresource of it. Raises `ApiNotFoundError` if there is none."""
        request = self._request(
            "GET", "get", api_version, kind, name=name, namespace=namespace, subresource=subresource
        )
        return self._transport.send(request).document()

    def look_up(
        self, api_version: str, kind: str, name: str, namespace: str | None = None
    ) -> Document | None:
        """The object; None if it does not exist, or the server does not know its kind."""
        try:
            return self.get(api_version, kind, name, namespace)
        except ApiNotFoundError:
            return None

    def find(self, manifest: Manifest) -> Document | None:
        """The object on the server, None if it does not exist. Raises `ApiNotFoundError` if the
        server does not know its kind.
        """
        try:
            return self.get(manifest.api_version, manifest.kind, manifest.name, manifest.namespace)
        except ApiNotFoundError as error:
            if not error.details.get("name"):
                raise  # the kind is missing, not the object
            return None

    def find_readable(
        self, api_version: str, kind: str, name: str, namespace: str | None = None
    ) -> Document | None:
        """The object; None if it does not exist, or the user may not read it."""
        try:
            return self.get(api_version, kind, name, namespace)
        except ApiError as error:
            if error.status not in _UNREADABLE:
                raise
            return None

    def list_readable(self, api_version: str, kind: str, **which: Any) -> list[Document]:
        """The objects that `which` chooses, as for `list`; none if the cluster does not serve the
        kind, or the user may not list it.
        """
        try:
            return self.list(api_version, kind, **which)
        except ApiError as error:
            if error.status not in _UNREADABLE:
                raise
            return []

    def send_apply(self, manifest: Manifest, *, dry_run: bool, force: bool) -> ApiResponse:
        """Send an object by server-side apply as the connection's field manager."""
        query = [
            ("fieldManager", self.field_manager),
            ("force", "true" if force else "false"),
            *_dry_run_query(dry_run),
        ]
        where: dict[str, Any] = {"name": manifest.name, "namespace": manifest.namespace}
        request = self._request(
            "PATCH", "apply", manifest.api_version, manifest.kind, query=query, **where
        )
        return self._transport.send(
            _with_body(request, manifest.document, "application/apply-patch+yaml")
        )

    def send_create(
        self,
        document: Mapping[str, Any],
        *,
        namespace: str | None = None,
        dry_run: bool = False,
        retry: bool = True,
    ) -> Document:
        """Create an object. `retry` says whether a failed request may be repeated."""
        request = self._request(
            "POST",
            "create",
            document["apiVersion"],
            document["kind"],
            namespace=namespace or (document.get("metadata") or {}).get("namespace"),
            query=_dry_run_query(dry_run),
        )
        return self._transport.send(
            _with_body(replace(request, retry=retry), document, "application/json")
        ).document()

    def send_patch(
        self,
        api_version: str,
        kind: str,
        name: str,
        body: Mapping[str, Any],
        *,
        namespace: str | None = None,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Document:
        """Change some fields of an object, or of a subresource of it; returns the changed object.

        `body` is a merge patch: null removes a field, a list replaces the whole list.
        """
        request = self._request(
            "PATCH",
            "patch",
            api_version,
            kind,
            name=name,
            namespace=namespace,
            subresource=subresource,
            query=[("fieldManager", self.field_manager), *_dry_run_query(dry_run)],
        )
        return self._transport.send(
            _with_body(request, body, "application/merge-patch+json")
        ).document()

    def send_delete(
        self,
        api_version: str,
        kind: str,
        name: str,
        *,
        namespace: str | None = None,
        propagation: str = "Background",
        grace: int | None = None,
        dry_run: bool = False,
        only: Mapping[str, Any] | None = None,
    ) -> bool:
        """Delete an object; False if it does not exist.

        `propagation` is `Background`, `Foreground` or `Orphan`, `grace` the grace period of a pod
        in seconds instead of that in its spec. `only` is the object as it was read; if it has
        changed or been replaced since, the server answers 409.
        """
        options: Document = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if only is not None:
            options["preconditions"] = identify(only)
        if dry_run:
            options["dryRun"] = ["All"]
        request = self._request(
            "DELETE", "delete", api_version, kind, name=name, namespace=namespace
        )
        try:
            self._transport.send(_with_body(request, options, "application/json"))
        except ApiNotFoundError:
            return False
        return True

    def _request(
        self,
        method: str,
        verb: str,
        api_version: str,
        kind: str,
        *,
        name: str = "",
        namespace: str | None = None,
        subresource: str = "",
        query: Sequence[tuple[str, str]] = (),
    ) -> ApiRequest:
        scope = namespace or self.namespace
        return ApiRequest(
            method,
            resources.path(api_version, kind, namespace=scope, name=name, subresource=subresource),
            f"{verb} {resources.named(api_version, kind)}{f'/{name}' if name else ''}",
            query,
        )


def _with_body(request: ApiRequest, body: Mapping[str, Any], content_type: str) -> ApiRequest:
    return replace(request, body=body, content_type=content_type)


def _dry_run_query(dry_run: bool) -> list[tuple[str, str]]:
    return [("dryRun", "All")] if dry_run else []


def connect(
    context: str | None = None,
    namespace: str | None = None,
    *,
    file: str | None = None,
    impersonation: Impersonation | None = None,
    retry_seconds: float | None = None,
    until: float | None = None,
    request_timeout: float = READ_SECONDS,
    notify: Callable[[str], None] = lambda _: None,
    field_manager: str = FIELD_MANAGER,
) -> Cluster:
    """Connect to a cluster as the kubeconfig says, or with the service account of the pod that this
    runs in. A credential plugin runs at once; nothing is sent to the server yet. Raises
    `KdistError` if there is no configuration, or it cannot be used (UNREACHABLE).

    Args:
        context: of the kubeconfig; None for the current one.
        namespace: default for all requests; None for the kubeconfig's.
        file: the kubeconfig; None for `$KUBECONFIG` or `~/.kube/config`.
        impersonation: the user to impersonate.
        retry_seconds: for how long each request is retried while the server is unreachable; None
            for `RETRY_SECONDS`.
        until: time on the monotonic clock until which outages are retried once the server has
            responded.
        request_timeout: seconds for a request and its response; 0 for no limit.
        notify: receives a message per outage.
        field_manager: name under which the server records what we change.
    """
    access = kubeconfig.load(context, file=file, impersonation=impersonation)
    transport = Transport(
        access,
        retry_seconds=retry_seconds,
        notify=notify,
        request_timeout=request_timeout,
        until=until,
    )
    return Cluster(transport, namespace or access.namespace, field_manager=field_manager)


class Cluster(Objects, PodStreams):
    """A cluster and a namespace in it. Threads may share one.

    Every method raises `ApiError` if the server rejects a request (`ApiNotFoundError`, which is a
    `NotFoundError`, if there is no such object), and `KdistError` with code UNREACHABLE if it does
    not respond. Without `namespace`, methods use the connection's own.
    """

    def __init__(
        self, transport: Transport, namespace: str, *, field_manager: str = FIELD_MANAGER
    ) -> None:
        super().__init__(transport, namespace, field_manager=field_manager)
        self.context = transport.access.context
        self.server = transport.access.server
        self._rules: list[dict[str, Any]] | None = None

    def within(self, namespace: str) -> Cluster:
        """The same connection with another namespace of its own."""
        return Cluster(self._transport, namespace, field_manager=self.field_manager)

    def staying(self, timeout: float | None) -> Cluster:
        """The same connection to watch a job: outages are waited for, until the time-out in seconds
        if there is one.
        """
        transport = self._transport.staying(timeout)
        return Cluster(transport, self.namespace, field_manager=self.field_manager)

    def proxy(
        self,
        pod: str,
        port: int,
        path: str,
        *,
        namespace: str | None = None,
        timeout: float = 5.0,
        most: int = 1 << 20,
    ) -> bytes:
        """Body of `GET path` from a pod's port, of at most `most` bytes, through the API server;
        requested once, within `timeout` seconds.
        """
        request = self._request(
            "GET",
            "proxy",
            "v1",
            "Pod",
            name=f"{pod}:{port}",
            namespace=namespace,
            subresource="proxy",
        )
        base = ApiRequest(
            "GET",
            f"{request.path}/{path.lstrip('/')}",
            f"GET {path} of pod/{pod}",
            accept="*/*",
            retry=False,
            timeout=timeout,
            most=most,
        )
        return self._transport.send(base).body

    def kinds(self) -> set[tuple[str, str]]:
        """Every (API version, kind) that the cluster serves."""
        return resources.kinds(self._transport)

    def serves(self, api_version: str, kind: str) -> bool:
        """Whether the cluster serves a kind; costs less than `kinds`."""
        return resources.is_served(self._transport, api_version, kind)

    def version(self) -> dict[str, Any]:
        """The server's version document: `gitVersion`, `major`, `minor`, …"""
        return self._transport.send(ApiRequest("GET", "/version", "get /version")).document()

    def can_i(
        self,
        verb: str,
        api_version: str,
        kind: str,
        *,
        namespace: str | None = None,
        name: str = "",
        subresource: str = "",
    ) -> bool:
        """Whether the current user may do this (SelfSubjectAccessReview)."""
        attributes = {
            "verb": verb,
            "group": resources.group(api_version),
            "resource": resources.plural(kind),
            "subresource": subresource,
            "name": name,
            "namespace": "" if kind in resources.CLUSTER_SCOPED else namespace or self.namespace,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {key: value for key, value in attributes.items() if value}
            },
        }
        return bool((self.send_create(review).get("status") or {}).get("allowed"))

    def rules(self) -> list[dict[str, Any]]:
        """The rules of the current user's rights in the namespace, as far as the server can list
        them: the list may be incomplete.
        """
        if self._rules is None:
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectRulesReview",
                "spec": {"namespace": self.namespace},
            }
            try:
                found = self.send_create(review)
            except ApiError:
                found = {}
            self._rules = list((found.get("status") or {}).get("resourceRules") or [])
        return self._rules

    def whoami(self) -> str:
        """The current user's name; empty before Kubernetes 1.28."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            found = self.send_create(review)
        except ApiNotFoundError:
            return ""
        return str(((found.get("status") or {}).get("userInfo") or {}).get("username") or "")
