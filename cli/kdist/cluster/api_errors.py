"""Errors of the API server as sentences: who may not do what, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kdist.errors import Code, KdistError, NotFoundError
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json

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


class ApiNotFoundError(NotFoundError, ApiError):
    """The API server answered that there is no such object, or no such kind."""


def read_status(body: bytes) -> dict[str, Any]:
    """The API's `Status` document in an answer; empty where a proxy or something else answered."""
    try:
        found = parse_json(body)
    except MalformedTextError:
        return {}
    return found if isinstance(found, dict) and found.get("kind") == "Status" else {}


def explain(
    status: int, body: bytes, *, description: str, namespace: str, context: str
) -> ApiError:
    """Convert a response with an error status to an exception.

    Args:
        status: HTTP status code, 400 or above.
        body: body of the response.
        description: the request in words, such as `get jobs.batch/digits`.
        namespace: default namespace of the connection.
        context: context of the connection.

    Returns:
        The exception; `ApiNotFoundError` for 404.
    """
    answer = read_status(body)
    message = str(
        answer.get("message") or body[:300].decode(errors="replace").strip() or f"HTTP {status}"
    )
    reason, details = str(answer.get("reason") or ""), answer.get("details")
    facts: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "details": details if isinstance(details, dict) else {},
    }
    if status == 401:
        return ApiError(
            f"the API server does not know who you are (context {context})",
            hint=(
                "the credentials in the kubeconfig are missing or have expired: log in to the "
                "cluster again"
            ),
            next_command="kdist doctor",
            code=Code.FORBIDDEN,
            **facts,
        )
    if status == 403 and (found := _FORBIDDEN.search(message)):
        return _forbidden(found, namespace=namespace, facts=facts)
    if status == 404:
        return _missing(
            message, bool(facts["details"].get("name")), description=description, facts=facts
        )
    if found := _WEBHOOK_FAILED.search(message):
        return _webhook_failed(found, description=description, facts=facts)
    if found := _DUPLICATE.search(message):
        key = found["key"].replace("=", " ")
        return ApiError(
            f"{description}: {found['list'].lstrip('.')} has two entries with {key}",
            hint="remove one of them from the job's podTemplate",
            **facts,
        )
    causes = [
        (str(each.get("field") or "").lstrip("."), str(each.get("message") or ""))
        for each in facts["details"].get("causes") or []
        if isinstance(each, dict)
    ]
    if status == 409 and causes and (owners := dict.fromkeys(_CONFLICT_OWNER.findall(message))):
        conflicts = "; ".join(
            f"{field} is set by {owner['manager'] if owner else why}"
            for field, why in causes
            for owner in [_CONFLICT_OWNER.search(why)]
        )
        hint = "leave these fields out of the job, or take them over with --force-conflicts"
        return ApiError(f"{description}: {conflicts}", hint=hint, owners=tuple(owners), **facts)
    if status == 422 and causes:
        # The message repeats the rejected value, which may be a whole pod template, and ends with
        # the reason.
        problems = "; ".join(
            f"{field}: {why if len(why) < 200 else why.rpartition(': ')[2]}"
            for field, why in causes
        )
        return ApiError(f"{description}: {problems}", **facts)
    return ApiError(f"{description}: {message}", **facts)


def _forbidden(found: re.Match[str], *, namespace: str, facts: dict[str, Any]) -> ApiError:
    resource, slash, part = found["resource"].partition("/")
    right = (
        f"{found['verb']} "
        f"{'.'.join(each for each in (resource, found['group']) if each)}{slash}{part}"
    )
    where = found["namespace"] or ""
    return ApiError(
        f"you are `{found['user']}`, who may not {right} "
        f"{f'in namespace {where}' if where else 'in the whole cluster'}",
        next_command=f"kdist doctor -n {where or namespace}",
        code=Code.FORBIDDEN,
        denied=Denied(right, where),
        **facts,
    )


def _webhook_failed(found: re.Match[str], *, description: str, facts: dict[str, Any]) -> ApiError:
    """The error for an admission webhook that does not answer."""
    from kdist.backends.operators import find_webhook_home

    home = find_webhook_home(found["why"])
    of = f" of the service {home[0]} in namespace {home[1]}" if home else ""
    why = found["why"].strip().removeprefix("failed to call webhook: ")
    return ApiError(
        f"{description}: the admission webhook {found['name']}{of} does not answer ({why})",
        hint=(
            "an administrator must restore its service, or remove its configuration; then try again"
        ),
        next_command=f"kubectl get pods -n {home[1]}"
        if home
        else "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations",
        **facts,
    )


def _missing(message: str, named: bool, *, description: str, facts: dict[str, Any]) -> ApiError:
    if found := _NO_NAMESPACE.search(message):
        name = found["namespace"]
        return ApiNotFoundError(
            f"there is no namespace {name}",
            next_command=f"kubectl create namespace {name}",
            **facts,
        )
    if named:
        return ApiNotFoundError(message, **facts)
    return ApiNotFoundError(
        f"{description}: this cluster has no such kind",
        hint="`kdist doctor` shows which workload kinds it has",
        next_command="kdist doctor",
        **facts,
    )
