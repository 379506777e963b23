"""The place where agents meet, as the command line names it."""

from __future__ import annotations

import pytest

from kdist_trainer.agent.settings import RendezvousEndpoint, parse_endpoint
from kdist_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("file:/run/store", RendezvousEndpoint("file", ("/run/store", ""))),
        (
            "kubernetes:ml/digits-rendezvous",
            RendezvousEndpoint("kubernetes", ("ml", "digits-rendezvous")),
        ),
        ("c10d:digits-0.digits:29400", RendezvousEndpoint("c10d", ("digits-0.digits", "29400"))),
        ("c10d:[fd00::1]:29400", RendezvousEndpoint("c10d", ("fd00::1", "29400"))),
    ],
)
def test_each_scheme_is_read(text: str, place: RendezvousEndpoint) -> None:
    assert parse_endpoint(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file:",
        "kubernetes:ml",
        "kubernetes:/x",
        "kubernetes:a/b/c",
        "c10d:host",
        "c10d::1",
        "c10d:h:0",
        "etcd:x:1",
    ],
)
def test_anything_else_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError, match="kubernetes:NAMESPACE/NAME"):
        parse_endpoint(text)
