"""Every verb that asks a cluster, while its API server is away, broken, busy or unwilling: the
right exit code, said in words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kdist.cluster import transport
from kdist.errors import Code
from tests.cli.cluster.api import Api, Asked, Reply, refusal, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.conftest import Kdist
from tests.cli.job.cluster.test_wait import DONE
from tests.cli.job.cluster.world import World

__all__ = ["_hurry", "serve"]

VERBS: dict[str, tuple[str, ...]] = {
    "apply": ("apply", "job.yaml", "--set", "spec.image=registry.example.com/trainer:1"),
    "diff": ("diff", "job.yaml", "--set", "spec.image=registry.example.com/trainer:1"),
    "get": ("get",),
    "status": ("status", "digits"),
    "status -w": ("status", "digits", "-w"),
    "logs": ("logs", "digits"),
    "logs -f": ("logs", "digits", "-f"),
    "wait": ("wait", "digits"),
    "events": ("events", "digits"),
    "why": ("why", "digits"),
    "top": ("top", "digits", "--once", "-n", "ml"),
    "top -o prom": ("top", "digits", "-o", "prom", "-n", "ml"),
    "report": ("report", "digits", "-n", "ml"),
    "checkpoints": ("checkpoints", "digits", "-n", "ml"),
    "exec": ("exec", "digits", "--", "true"),
    "port-forward": ("port-forward", "digits", ":9401"),
    "scale": ("scale", "digits", "--nodes", "3"),
    "suspend": ("suspend", "digits"),
    "resume": ("resume", "digits"),
    "restart": ("restart", "digits"),
    "drill": ("drill", "digits"),
    "delete": ("delete", "digits"),
}
each_verb = pytest.mark.parametrize("verb", VERBS)

Point = Callable[[str], None]


@pytest.fixture
def point(tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> Point:
    """`point(url)` has the kubeconfig name this server; nobody is patient."""
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0.02)

    def write(url: str) -> None:
        write_kubeconfig(tmp_path / "kubeconfig", url)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    return write


def type_impatiently(kdist: Kdist, verb: str) -> tuple[int, str]:
    """Exit code and stderr of the verb."""
    words = VERBS[verb]
    options_at = words.index("--") if "--" in words else len(words)
    shown = kdist(*words[:options_at], "--timeout", "0.02", *words[options_at:])
    return shown.exit_code, shown.stderr


@each_verb
def test_a_server_that_stays_away_is_reported_with_where_it_should_be(
    kdist: Kdist, point: Point, verb: str
) -> None:
    gone = Api(World())
    gone.close()
    point(gone.url)
    code, printed = type_impatiently(kdist, verb)
    assert code == Code.UNREACHABLE, printed
    assert "does not answer" in printed
    assert f"127.0.0.1:{gone.port}" in printed
    assert "internal error" not in printed


@each_verb
@pytest.mark.parametrize(
    ("status", "words"), [(500, "etcd is down"), (429, "too many requests"), (503, "shutting down")]
)
def test_a_server_that_stays_broken_or_busy_is_reported_in_its_own_words(
    kdist: Kdist, point: Point, serve: Serve, verb: str, status: int, words: str
) -> None:
    point(serve(lambda _: refusal(status, words)).url)
    code, printed = type_impatiently(kdist, verb)
    assert code == Code.UNREACHABLE, printed
    assert words in printed


@each_verb
def test_who_is_not_known_or_not_allowed_hears_it(
    kdist: Kdist, point: Point, serve: Serve, verb: str
) -> None:
    point(serve(lambda _: refusal(401, "Unauthorized", "Unauthorized")).url)
    code, printed = type_impatiently(kdist, verb)
    assert code == Code.FORBIDDEN, printed
    assert "does not know who you are" in printed


@each_verb
def test_whoever_acts_as_another_does_so_in_every_request(
    kdist: Kdist,
    point: Point,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    world = World()
    world.workload = DONE if verb == "status -w" else world.workload  # which only its end ends
    api = serve(
        lambda asked: (
            world(asked)
            if asked.method == "GET" and asked.path != "/apis"
            else refusal(403, "not you")
        )
    )
    point(api.url)
    monkeypatch.delenv("KUBECONFIG")
    words = VERBS[verb]
    login = (
        "--kubeconfig",
        str(tmp_path / "kubeconfig"),
        "--as",
        "anna",
        "--as-group",
        "ml",
        "--request-timeout",
        "5s",
    )
    kdist(words[0], *login, "--timeout", "0.02", *words[1:])
    assert api.asked
    for each in api.asked:
        assert (each.headers.get("impersonate-user"), each.headers.get("impersonate-group")) == (
            "anna",
            "ml",
        ), each.path


LOOKS = ("get", "status", "logs", "events", "why")


@pytest.mark.parametrize("verb", LOOKS)
def test_a_server_that_stumbles_once_at_each_question_is_no_news(
    kdist: Kdist, point: Point, serve: Serve, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "RETRY_SECONDS", 20.0)
    world, stumbled = World(), set[str]()
    world.logs = {each["metadata"]["name"]: [] for each in world.pods}

    def stumble(asked: Asked) -> Reply:
        if "/proxy" not in asked.path and asked.path not in stumbled:
            stumbled.add(asked.path)
            return refusal((429, 500, 503)[len(stumbled) % 3], "not now")
        return world(asked)

    point(serve(stumble).url)
    shown = kdist(*VERBS[verb])
    assert shown.exit_code == Code.OK, shown.stderr
    assert stumbled
