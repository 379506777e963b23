"""What the API server refuses is said as who may not do what, with the way out."""

from __future__ import annotations

import pytest

from kdist.cluster import ApiError, ApiNotFoundError, Applied, Cluster, JobObjects, JobOwner
from kdist.errors import Code, NotFoundError
from kdist.manifest import Manifest
from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.cluster.conftest import Connect, Serve

MAP = Manifest(
    {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "digits",
            "annotations": {"kdist.dev/owner": "digits/configmap/digits"},
        },
        "data": {"a": "1"},
    }
)


def apply(found: Cluster) -> Applied:
    """Apply it as the job `digits`."""
    return JobObjects(found, JobOwner(found.namespace, "digits")).apply(MAP)


def refuse(reply: Reply, serve: Serve, connect: Connect) -> ApiError:
    """The error of a request that is answered so."""
    with pytest.raises(ApiError) as raised:
        connect(serve(lambda _: reply).url).get("batch/v1", "Job", "digits")
    return raised.value


def test_who_is_not_known_is_sent_to_log_in(serve: Serve, connect: Connect) -> None:
    error = refuse(refusal(401, "Unauthorized", "Unauthorized"), serve, connect)
    assert str(error) == "the API server does not know who you are (context test)"
    assert (error.code, error.next_command) == (Code.FORBIDDEN, "kdist doctor")
    assert "expired" in error.hint


def test_who_may_not_is_reported_the_verb_the_resource_and_the_namespace(
    serve: Serve, connect: Connect
) -> None:
    message = (
        'jobs.batch "digits" is forbidden: User "jane" cannot get resource "jobs" in API '
        'group "batch" in the namespace "ml"'
    )
    error = refuse(refusal(403, message, "Forbidden"), serve, connect)
    assert str(error) == "you are `jane`, who may not get jobs.batch in namespace ml"
    assert error.denied == ("get jobs.batch", "ml")
    assert (error.code, error.next_command) == (Code.FORBIDDEN, "kdist doctor -n ml")


def test_a_verb_that_is_more_than_a_word_is_read_too(serve: Serve, connect: Connect) -> None:
    message = (
        'User "ci" cannot impersonate-on:user-info:get resource "jobs" in API group "batch" '
        'in the namespace "ml"'
    )
    error = refuse(refusal(403, message, "Forbidden"), serve, connect)
    expected = "you are `ci`, who may not impersonate-on:user-info:get jobs.batch in namespace ml"
    assert str(error) == expected
    assert error.code == Code.FORBIDDEN


def test_what_a_policy_forbids_is_given_in_its_own_words(serve: Serve, connect: Connect) -> None:
    reply = refusal(403, 'pods "x" is forbidden: exceeded quota: small', "Forbidden")
    error = refuse(reply, serve, connect)
    assert "exceeded quota: small" in str(error)
    assert error.code == Code.ERROR


def test_an_object_that_is_not_there_is_told_apart_from_a_kind_that_is_not(
    serve: Serve, connect: Connect
) -> None:
    reply = refusal(404, 'jobs.batch "digits" not found', "NotFound", name="digits", kind="jobs")
    gone = refuse(reply, serve, connect)
    assert isinstance(gone, NotFoundError)
    assert str(gone) == 'jobs.batch "digits" not found'
    unknown = refuse(Reply(404, "404 page not found"), serve, connect)
    assert isinstance(unknown, ApiNotFoundError)
    assert str(unknown) == "get jobs.batch/digits: this cluster has no such kind"
    assert unknown.code == Code.NOT_FOUND


def test_a_namespace_that_is_not_there_comes_with_the_command_that_makes_it(
    serve: Serve, connect: Connect
) -> None:
    reply = refusal(404, 'namespaces "ml" not found', "NotFound", name="ml", kind="namespaces")
    error = refuse(reply, serve, connect)
    assert str(error) == "there is no namespace ml"
    assert error.next_command == "kubectl create namespace ml"


def test_a_refused_field_is_named_without_the_value_in_gos_notation(
    serve: Serve, connect: Connect
) -> None:
    value = "core.PodTemplateSpec{" + "x" * 5000 + "}"
    cause = {"field": "spec.template", "reason": "FieldValueInvalid"}
    cause["message"] = f"Invalid value: {value}: field is immutable"
    message = f'Job.batch "digits" is invalid: {value}: field is immutable'
    reply = refusal(422, message, "Invalid", name="digits", causes=[cause])
    expected = "get jobs.batch/digits: spec.template: field is immutable"
    assert str(refuse(reply, serve, connect)) == expected


def conflict(*owners: str) -> Reply:
    """A server-side apply that meets other managers' fields."""
    reported = [f'conflict with "{owner}" using batch/v1' for owner in owners]
    causes = [{"field": ".spec.suspend", "message": each} for each in reported]
    message = f"Apply failed with 1 conflict: {' '.join(reported)}"
    return refusal(409, message, "Conflict", causes=causes)


def test_a_conflict_names_the_field_and_its_owner(serve: Serve, connect: Connect) -> None:
    found, refused = Reply(document=MAP.document), conflict("kubectl-edit")
    api = serve(lambda asked: found if asked.method == "GET" else refused)
    with pytest.raises(ApiError, match=r"spec\.suspend is set by kubectl-edit") as raised:
        apply(connect(api.url))
    assert "--force-conflicts" in raised.value.hint
    assert raised.value.owners == ("kubectl-edit",)


def test_a_conflict_with_our_own_patches_is_won_by_the_file(serve: Serve, connect: Connect) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply(document=MAP.document | {"data": {"a": "0"}})
        return Reply(document=MAP.document) if asked.query["force"] == "true" else conflict("kdist")

    assert apply(connect(serve(answer).url)).verb == "configured"


def test_a_webhook_whose_service_is_known_is_named_with_it(serve: Serve, connect: Connect) -> None:
    url = "https://kueue-webhook-service.kueue-system.svc:443/mutate-batch-v1-job?timeout=10s"
    message = (
        f'Internal error occurred: failed calling webhook "mjob.kb.io": '
        f'failed to call webhook: Post "{url}": '
        'no endpoints available for service "kueue-webhook-service"'
    )
    api = connect(serve(lambda _: refusal(500, message)).url, retry_seconds=0.01)
    printed = "of the service kueue-webhook-service in namespace kueue-system"
    with pytest.raises(ApiError, match=printed) as raised:
        api.get("batch/v1", "Job", "digits")
    assert raised.value.next_command == "kubectl get pods -n kueue-system"


def test_a_webhook_that_is_away_is_named_with_where_it_is_configured(
    serve: Serve, connect: Connect
) -> None:
    message = (
        'Internal error occurred: failed calling webhook "mjob.kb.io": '
        'failed to call webhook: Post "https://x": refused'
    )
    api = connect(serve(lambda _: refusal(500, message)).url, retry_seconds=0.01)
    with pytest.raises(ApiError) as raised:
        api.get("batch/v1", "Job", "digits")
    printed = "get jobs.batch/digits: the admission webhook mjob.kb.io does not answer (Post"
    assert printed in str(raised.value)
    assert "webhookconfigurations" in raised.value.next_command
    assert raised.value.code == Code.UNREACHABLE
