"""Errors of the API server as sentences: who may not do what, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kdist.errors import Code, KdistError, NotFoundError
from kdist.status import documents

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>[\w:-]+) resource "(?P<resource>[^"]+)"'
    r'(?: in API group "(?P<group>[^"]*)")?(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_NO_NAMESPACE = re.compile(r'namespaces "(?P<namespace>[^"]+)" not found')
_WEBHOOK_FAILED = re.compile(r'failed calling webhook "(?P<name>[^"]+)":(?P<why>.*)', re.DOTALL)
# `.spec.template.spec.containers[name="trainer"].volumeMounts: duplicate entries for key
# [mountPath="/data"]`
_DUPLICATE = re.compile(r"(?P<list>\.[^ :]*): duplicate entries for key \[(?P<key>[^\]]+)\]")
_CONFLICT_OWNER = re.compile(r'conflicts? with "(?P<manager>[^"]+)"')


class Denied(NamedTuple):
    """A missing right, such as `get jobs.batch`; an empty namespace means the whole cluster."""

    right: str
    namespace: str


class ApiError(KdistError):
    """The API server rejected a request.

    Attributes:
        status: HTTP status code.
        reason: the API's reason (`Conflict`, `Invalid`, `Forbidden`, …).
        details: `details` of the API's `Status`.
        owners: field managers that a server-side apply conflicts with.
        denied: the missing right.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        owners: tuple[str, ...] = (),
        denied: Denied | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(message, **extra)
        self.status = status
        self.reason = reason
        self.details = dict(details or {})
        self.owners = owners
        self.denied = denied


Make = Callable[..., ApiError]


class ApiNotFoundError(NotFoundError, ApiError):
    """The API server answered that there is no such object, or no such kind."""


def read_status(body: bytes) -> dict[str, Any]:
    """The API's `Status` document in an answer; empty where a proxy or something else answered."""
    found = documents.parse(body)
    return found if found.get("kind") == "Status" else {}


def explain(
    status: int, body: bytes, *, description: str, namespace: str, context: str
) -> ApiError:
    """Convert a response with an error status to an exception, `ApiNotFoundError` for 404.

    Args:
        status: HTTP status code, 400 or above.
        body: body of the response.
        description: the request in words, such as `get jobs.batch/digits`.
        namespace: default namespace of the connection.
        context: context of the connection.
    """
    answer = read_status(body)
    message = str(
        answer.get("message") or body[:300].decode(errors="replace").strip() or f"HTTP {status}"
    )
    reason, details = str(answer.get("reason") or ""), answer.get("details")
    details = details if isinstance(details, dict) else {}
    make = partial(ApiError, status=status, reason=reason, details=details)
    if status == 401:
        return make(
            f"the API server does not know who you are (context {context})",
            hint=(
                "the credentials in the kubeconfig are missing or have expired: log in to the "
                "cluster again"
            ),
            next_command="kdist doctor",
            code=Code.FORBIDDEN,
        )
    if status == 403 and (found := _FORBIDDEN.search(message)):
        return _forbidden(found, namespace=namespace, make=make)
    if status == 404:
        absent = partial(ApiNotFoundError, **make.keywords)
        return _missing(message, bool(details.get("name")), description=description, make=absent)
    if found := _WEBHOOK_FAILED.search(message):
        return _webhook_failed(found, description=description, make=make)
    if found := _DUPLICATE.search(message):
        key = found["key"].replace("=", " ")
        return make(
            f"{description}: {found['list'].lstrip('.')} has two entries with {key}",
            hint="remove one of them from the job's podTemplate",
        )
    causes = [
        (str(each.get("field") or "").lstrip("."), str(each.get("message") or ""))
        for each in details.get("causes") or []
        if isinstance(each, dict)
    ]
    if status == 409 and causes and (owners := dict.fromkeys(_CONFLICT_OWNER.findall(message))):
        conflicts = "; ".join(
            f"{field} is set by {owner['manager'] if owner else why}"
            for field, why in causes
            for owner in [_CONFLICT_OWNER.search(why)]
        )
        hint = "leave these fields out of the job, or take them over with --force-conflicts"
        return make(f"{description}: {conflicts}", hint=hint, owners=tuple(owners))
    if status == 422 and causes:
        # The message repeats the rejected value, which may be a whole pod template, and ends with
        # the reason.
        problems = "; ".join(
            f"{field}: {why if len(why) < 200 else why.rpartition(': ')[2]}"
            for field, why in causes
        )
        return make(f"{description}: {problems}")
    return make(f"{description}: {message}")


def _forbidden(found: re.Match[str], *, namespace: str, make: Make) -> ApiError:
    resource, slash, part = found["resource"].partition("/")
    right = (
        f"{found['verb']} "
        f"{'.'.join(each for each in (resource, found['group']) if each)}{slash}{part}"
    )
    where = found["namespace"] or ""
    return make(
        f"you are `{found['user']}`, who may not {right} "
        f"{f'in namespace {where}' if where else 'in the whole cluster'}",
        next_command=f"kdist doctor -n {where or namespace}",
        code=Code.FORBIDDEN,
        denied=Denied(right, where),
    )


def _webhook_failed(found: re.Match[str], *, description: str, make: Make) -> ApiError:
    """The error for an admission webhook that does not answer."""
    from kdist.backends.operators import find_webhook_home

    of, show = find_webhook_home(found["why"])
    why = found["why"].strip().removeprefix("failed to call webhook: ")
    return make(
        f"{description}: the admission webhook {found['name']}{of} does not answer ({why})",
        hint=(
            "an administrator must restore its service, or remove its configuration; then try again"
        ),
        next_command=show
        or "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations",
    )


def no_namespace(name: str) -> tuple[str, str]:
    """That there is none of this name, and the command that makes it."""
    return f"there is no namespace {name}", f"kubectl create namespace {name}"


def _missing(message: str, named: bool, *, description: str, make: Make) -> ApiError:
    if found := _NO_NAMESPACE.search(message):
        words, command = no_namespace(found["namespace"])
        return make(words, next_command=command)
    if named:
        return make(message)
    return make(
        f"{description}: this cluster has no such kind",
        hint="`kdist doctor` shows which workload kinds it has",
        next_command="kdist doctor",
    )
