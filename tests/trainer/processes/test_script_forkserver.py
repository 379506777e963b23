"""What the forkserver of scripts must not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist_trainer.processes import script_forkserver


def test_a_device_that_importing_torch_has_opened_is_named_and_no_fork_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[bool] = []
    monkeypatch.setattr(script_forkserver, "share_with_forks", lambda: shared.append(True))
    monkeypatch.setattr(script_forkserver, "_MODULES", ())
    monkeypatch.setattr(script_forkserver, "_DEVICES", ("/dev/full",))
    monkeypatch.setattr("threading.active_count", lambda: 1)
    with Path("/dev/full").open("rb"), pytest.raises(RuntimeError, match=r"opened: .*/dev/full"):
        script_forkserver._import_modules()
    assert not shared
    script_forkserver._import_modules()
    assert shared
