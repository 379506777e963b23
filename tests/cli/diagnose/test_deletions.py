"""Objects of a job that were deleted while its pods run are named, and nothing that is there or was
another job's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kdist.diagnose import diagnose
from tests.cli.diagnose.scenes import scene
from tests.cli.status.objects import Document, at, pod, report, workload

FIRST, OLD = "digits-0-abcde", "digits-1-abcde"


def deleting(index: int) -> Document:
    found = pod(index)
    found["metadata"]["deletionTimestamp"] = at(-25)
    return found


@pytest.mark.parametrize(
    ("refusal", "words", "fix"),
    [
        ("401: the API server does not accept the pod's token", "their token (401)", "restart"),
        ("403: the API server does not permit", "the Role or the RoleBinding", "kdist apply"),
        ("404: the API server does not have", "ConfigMap was deleted (404)", "kdist apply"),
        (None, "ServiceAccount, its Role or its RoleBinding", "kdist apply"),
    ],
)
def test_a_refusal_of_the_api_server_is_named_by_its_status(
    refusal: str | None, words: str, fix: str
) -> None:
    refused: dict[str, Any] = {"rendezvous_refused": True, "rendezvous_refusal": refusal}
    reports = {FIRST: report(**refused), OLD: report(ranks=(1,), **refused)}
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert found.cause == "account-gone"
    assert words in found.sentence
    assert fix in found.fix


def with_account(found: Document) -> Document:
    found["spec"] |= {"serviceAccountName": "digits", "volumes": [{"name": "token"}]}
    return found


def test_what_the_pods_of_a_job_that_was_deleted_have_lost_is_not_gone_from_the_new_one() -> None:
    ending = [with_account(deleting(index)) for index in (0, 1)]
    refused = report(rendezvous_refused=True, rendezvous_refusal="404: the API server")
    reports = {FIRST: refused, OLD: refused}
    seen = scene(ending, accounts={"digits": {}}, reports=reports, over=workload(age=1))
    assert diagnose(seen).cause not in ("account-gone", "configmap-gone")
    without = replace(seen, config_map={}, workload=None, state=None)
    assert diagnose(without).cause not in ("account-gone", "configmap-gone")
    staying = [ending[0], with_account(pod(1))]
    assert diagnose(replace(seen, pods=staying)).cause == "account-gone"


def test_a_config_map_that_is_there_again_is_not_called_deleted_until_agents_have_asked() -> None:
    refused = report(rendezvous_refused=True, rendezvous_refusal="404: the API server does not")
    reports = {FIRST: refused, OLD: report(ranks=(1,))}
    seen = scene([pod(0), pod(1)], reports=reports)
    assert diagnose(seen).cause == "account-gone"
    again = diagnose(replace(seen, config_maps={"digits", "digits-rendezvous"}))
    assert again.cause == "none"
    refused["rendezvous_refusal"] = "403: the API server does not permit"
    forbidden = replace(seen, config_maps={"digits-rendezvous"})
    assert diagnose(forbidden).cause == "account-gone"


def test_a_config_map_that_was_deleted_is_named_before_what_the_job_does() -> None:
    seen = scene([pod(0), pod(1)], reports={FIRST: report(), OLD: report(ranks=(1,))})
    found = diagnose(replace(seen, config_map={}, workload=None, state=None))
    assert (found.cause, found.severity) == ("configmap-gone", "blocked")
    assert "ConfigMap digits does not exist in namespace ml" in found.sentence
    refused = {FIRST: report(rendezvous_refused=True), OLD: report(ranks=(1,))}
    again = diagnose(replace(seen, config_map={}, workload=None, state=None, reports=refused))
    assert again.cause == "configmap-gone"
