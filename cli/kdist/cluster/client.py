"""`Cluster`: a connection to a Kubernetes API server, made by `connect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kdist.cluster import kubeconfig, resources, streams, watch
from kdist.cluster.access import Impersonation
from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.objects import FIELD_MANAGER, Objects
from kdist.cluster.transport import READ_SECONDS, ApiRequest, Transport
from kdist.errors import KdistError


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
