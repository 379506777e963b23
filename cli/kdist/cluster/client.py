"""`Cluster`: a connection to a Kubernetes API server, made by `connect`, and the requests on
objects: get, list page by page, watch, and those that change one, `send_…`. The objects of a job
are changed through `JobObjects` only, which checks them first. A cluster may not serve
TrainingJobs, or not show them to the user.

A change contains the uid and resourceVersion of the object that was read. If the object has changed
since, the API server answers 409, and the object is read and changed again. The normalized form of
an object shows whether a server-side apply has changed it.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from kdist.cluster import kubeconfig, resources, streams, watch
from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.kubeconfig import Impersonation
from kdist.cluster.transport import (
    MOST_BYTES,
    READ_SECONDS,
    ApiRequest,
    ApiResponse,
    ResponseTooLargeError,
    Transport,
)
from kdist.cluster.watch import Trim, keep
from kdist.errors import KdistError
from kdist.manifest import TRAINING_JOB, Manifest

PAGE = 500
PAGE_BYTES = 2 << 20
"""Of a page with several objects. Parsed, an object can take forty times its bytes, and whoever may
create objects chooses their size.
"""

Document = dict[str, Any]


class ObjectLists:
    """The lists of one cluster's objects, and what changes in them. Arguments and errors are those
    of `kdist.cluster.client.Objects`.
    """

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace

    def list(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
        selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
    ) -> builtins.list[Document]:
        """List the objects of a kind, in the server's order; with `metadata_only` nothing but
        their metadata.
        """
        scope = None if all_namespaces else namespace or self.namespace
        return self.list_with_version(
            api_version,
            kind,
            namespace=scope,
            selector=selector,
            field_selector=field_selector,
            metadata_only=metadata_only,
        )[0]

    def list_with_version(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
        trim: Trim = keep,
    ) -> tuple[builtins.list[Document], str]:
        """The arguments are those of `list`, except that namespace None means all namespaces, and
        that of each object only what `trim` returns is kept in memory.

        Returns:
            The objects, and the resourceVersion of the list, from which a watch continues.
        """
        chosen = [("labelSelector", selector), ("fieldSelector", field_selector)]
        query = [(key, value) for key, value in chosen if value]
        request = ApiRequest(
            "GET",
            resources.path(api_version, kind, namespace=namespace),
            f"list {resources.named(api_version, kind)}",
            [("limit", str(PAGE)), *query],
            accept=watch.METADATA_LIST if metadata_only else "application/json",
            most=PAGE_BYTES,
        )
        found: list[Document] = []
        size, after = PAGE, ""
        while True:
            try:
                page = self._transport.send(request).document()
            except ResponseTooLargeError:
                if size == 1 or request.query == query:
                    raise
                size = max(1, size // 4)
                request = _limit(request, query, size, after)
                continue
            except ApiError as error:
                if error.status != HTTPStatus.GONE or request.query == query:
                    raise
                # The version that the pages belong to has expired: list everything in one page, as
                # Kubernetes' own clients do.
                found, request = [], replace(request, query=query, most=MOST_BYTES)
                continue
            # The items of a list come without their kind.
            found += [
                trim({**item, "apiVersion": api_version, "kind": kind})
                for item in page.get("items") or []
            ]
            metadata = page.get("metadata") or {}
            after = str(metadata.get("continue") or "")
            if not after:
                return found, str(metadata.get("resourceVersion") or "")
            request = _limit(request, query, size, after)

    def watch(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
        selector: str = "",
        field_selector: str = "",
        timeout: float | None = None,
        since: str = "",
    ) -> Iterator[tuple[str, Document]]:
        """Watch objects for `timeout` seconds, or without limit.

        Yields (ADDED | MODIFIED | DELETED, object) for those that exist, then for every change;
        with `since`, the resourceVersion of a list, only the changes after it. It survives lost
        connections and expired versions (410) without missing a final state.
        """
        scope = None if all_namespaces else namespace or self.namespace
        return watch.watch(
            self._transport,
            self.list_with_version,
            api_version,
            kind,
            namespace=scope,
            selector=selector,
            field_selector=field_selector,
            timeout=timeout,
            version=since,
        )

    def follow(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str = "",
        since: str,
        metadata_only: bool = False,
        trim: Trim = keep,
    ) -> Iterator[tuple[str, Document]]:
        """Every change after the resourceVersion `since` of `list_with_version`, whose arguments
        these are, for whoever keeps a copy of the objects.

        Yields (ADDED | MODIFIED | DELETED, object), and (BOOKMARK, {}) whenever the server has
        shown that nothing was missed. It survives lost connections. Raises `ApiError` with status
        410 when `since` has expired: the objects must be listed again.
        """
        return watch.follow(
            self._transport,
            api_version,
            kind,
            namespace=namespace,
            selector=selector,
            version=since,
            metadata_only=metadata_only,
            trim=trim,
        )


def _limit(
    request: ApiRequest, query: builtins.list[tuple[str, str]], size: int, after: str
) -> ApiRequest:
    """The request for a page of so many objects, after those of an earlier one."""
    place = [("continue", after)] if after else []
    most = PAGE_BYTES if size > 1 else MOST_BYTES
    return replace(request, query=[("limit", str(size)), *query, *place], most=most)


# Metadata that the server sets.
_SERVER_SET = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink"}
)


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
    verb: Literal["created", "configured", "unchanged"]
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
        return self._ask(
            "GET", "get", api_version, kind, name=name, namespace=namespace, subresource=subresource
        )

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
        name: str = "",
        subresource: str = "",
        dry_run: bool = False,
        again: bool = True,
    ) -> Document:
        """Create an object. `again` says whether a failed request may be repeated.

        With `name` and `subresource` it creates a subresource of a pod, such as an eviction.
        """
        api_version, kind = document["apiVersion"], document["kind"]
        if subresource:  # POST …/pods/NAME/eviction: the path is the parent's
            api_version, kind = "v1", "Pod"
        metadata = document.get("metadata") or {}
        scope = namespace or metadata.get("namespace")
        request = self._request(
            "POST",
            "create",
            api_version,
            kind,
            name=name,
            namespace=scope,
            subresource=subresource,
            query=_dry_run_query(dry_run),
        )
        return self._transport.send(
            _with_body(replace(request, again=again), document, "application/json")
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

    def _ask(self, method: str, verb: str, api_version: str, kind: str, **where: Any) -> Document:
        return self._transport.send(
            self._request(method, verb, api_version, kind, **where)
        ).document()

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
        what = f"{verb} {resources.named(api_version, kind)}{f'/{name}' if name else ''}"
        return ApiRequest(
            method,
            resources.path(api_version, kind, namespace=scope, name=name, subresource=subresource),
            what,
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
    retry_seconds: float = 60.0,
    until: float | None = None,
    request_timeout: float = READ_SECONDS,
    notify: Callable[[str], None] = lambda _: None,
    field_manager: str = FIELD_MANAGER,
) -> Cluster:
    """Connect to a cluster as the kubeconfig says, or with the service account of the pod that this
    runs in. A credential plugin runs at once; nothing is sent to the server yet.

    Args:
        context: of the kubeconfig; None for the current one.
        namespace: default for all requests; None for the kubeconfig's.
        file: the kubeconfig; None for `$KUBECONFIG` or `~/.kube/config`.
        impersonation: whom to act as.
        retry_seconds: for how long each request is retried while the server is unreachable.
        until: time on the monotonic clock until which outages are retried once the server has
            responded.
        request_timeout: seconds for a request and its response; 0 for no limit.
        notify: receives a message per outage.
        field_manager: name under which the server records what we change.

    Raises:
        KdistError: there is no configuration, or it cannot be used (UNREACHABLE).
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


class Cluster(Objects):
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

    def logs(
        self,
        pod: str,
        *,
        namespace: str | None = None,
        container: str = "trainer",
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: float | str | None = None,
        timestamps: bool = False,
    ) -> Iterator[str]:
        """Lines of a container's log, without their ends; `since` is a number of seconds back, or a
        moment as RFC 3339 text.

        With `follow` it ends when the container has ended; a cut connection is taken up again. A
        container that has not begun is a `ApiError` with status 400.
        """
        wanted = watch.LogQuery(
            pod, namespace or self.namespace, container, follow, previous, tail, since, timestamps
        )
        return watch.read(self._transport, wanted)

    def exec(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        namespace: str | None = None,
        container: str = "trainer",
        stdin: bool = False,
        tty: bool = False,
        out: Callable[[bytes], object] | None = None,
        err: Callable[[bytes], object] | None = None,
    ) -> int:
        """Run a command in a container and return its exit code. What it writes goes to `out` and
        `err` (ours by default).
        """
        return streams.execute(
            self._transport,
            pod,
            argv,
            namespace=namespace or self.namespace,
            container=container,
            stdin=stdin,
            tty=tty,
            out=out,
            err=err,
        )

    def run(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        namespace: str | None = None,
        container: str = "trainer",
        timeout: float = 30.0,
        most: int = 256 << 20,
    ) -> tuple[int, bytes]:
        """Run a command and collect what it writes to stdout: (exit code, output). Its stderr is
        dropped.

        Raises `KdistError` if it writes more than `most` bytes, and with code TIMEOUT if it takes
        longer than `timeout` seconds.
        """
        found = bytearray()

        def collect(data: bytes) -> None:
            if len(found) + len(data) > most:
                raise KdistError(f"exec in pod/{pod}: it writes more than {most >> 20} MiB")
            found.extend(data)

        code = streams.execute(
            self._transport,
            pod,
            argv,
            namespace=namespace or self.namespace,
            container=container,
            stdin=False,
            tty=False,
            out=collect,
            err=lambda _: None,
            timeout=timeout,
        )
        return code, bytes(found)

    def session(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        namespace: str | None = None,
        container: str = "trainer",
    ) -> AbstractContextManager[streams.ExecSession]:
        """A command that runs as long as the context lasts: then its standard input ends."""
        return streams.session(
            self._transport, pod, argv, namespace=namespace or self.namespace, container=container
        )

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
        asked once, within `timeout` seconds.
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
            again=False,
            timeout=timeout,
            most=most,
        )
        return self._transport.send(base).body

    def forward(
        self, pod: str, port: int, *, namespace: str | None = None, local: int = 0
    ) -> AbstractContextManager[int]:
        """A port on 127.0.0.1 (`local`, or a free one) whose connections end at the pod's port, as
        long as the context lasts.

        Each connection is carried by itself, so an API server that was away is no matter to the
        ones that come after.
        """
        return streams.forward(
            self._transport, pod, port, namespace=namespace or self.namespace, local=local
        )

    def check_forward(self, pod: str, port: int, *, namespace: str | None = None) -> None:
        """Raises `KdistError` where no connection can be forwarded to the pod; `forward` itself
        closes each connection without a word.
        """
        streams.open_forward(
            self._transport, pod, port, namespace=namespace or self.namespace
        ).close()

    def kinds(self) -> set[tuple[str, str]]:
        """Every (API version, kind) that the cluster serves."""
        return resources.kinds(self._transport)

    def serves(self, api_version: str, kind: str) -> bool:
        """Whether the cluster serves a kind; costs less than `kinds`."""
        return resources.is_served(self._transport, api_version, kind)

    def version(self) -> dict[str, Any]:
        """The server's own words on its version: `gitVersion`, `major`, `minor`, …"""
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
        """Whether the server would let us, by what it knows of our rights."""
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
        """The rules of our rights in the namespace, as far as the server can list them: what is not
        in them may still be so.
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
        """The user name under which the server knows us; empty before Kubernetes 1.28."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            found = self.send_create(review)
        except ApiNotFoundError:
            return ""
        return str(((found.get("status") or {}).get("userInfo") or {}).get("username") or "")


_ABSENT = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


def find_resource(cluster: Cluster, name: str, namespace: str | None = None) -> Document | None:
    """The TrainingJob of this name; None if there is none, if the cluster serves no TrainingJobs,
    or if the user may not read them.
    """
    try:
        return cluster.get(*TRAINING_JOB, name, namespace)
    except ApiError as error:
        if error.status not in _ABSENT:
            raise
        return None


def list_resources(
    cluster: Cluster,
    namespace: str | None = None,
    *,
    all_namespaces: bool = False,
    selector: str = "",
) -> list[Document]:
    """The TrainingJobs with these labels; none if the cluster serves none, or the user may not
    list them.
    """
    try:
        return cluster.list(
            *TRAINING_JOB, namespace=namespace, all_namespaces=all_namespaces, selector=selector
        )
    except ApiError as error:
        if error.status not in _ABSENT:
            raise
        return []
