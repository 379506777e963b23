"""Scripts under the runner alone, without an agent: they begin and end as under Python itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kdist_trainer.ipc import result


def run_script(
    path: Path, *arguments: str, code: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script by the runner alone, without an agent."""
    path.write_text(textwrap.dedent(code))
    command = [sys.executable, "-u", "-m", "kdist_trainer.run_script", str(path), *arguments]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("environment", "times"),
    [({}, True), ({"KDIST_COLLECTIVE_TIMING": "off"}, False), ({"WORLD_SIZE": "1"}, False)],
)
def test_collectives_are_timed_where_there_are_any_and_nobody_says_no(
    tmp_path: Path, environment: dict[str, str], times: bool
) -> None:
    code = """
        import importlib.util, sys
        assert importlib.util.find_spec("torch").origin and \
"kdist_trainer.instrumentation.collective_hooks" not in sys.modules
        import torch
        print("kdist_trainer.instrumentation.collective_hooks" in sys.modules)
    """
    around = {
        "KDIST_GENERATION": "1",
        "KDIST_METRICS_SOCKET": str(tmp_path / "nobody.sock"),
        "WORLD_SIZE": "2",
        **environment,
    }
    assert run_script(tmp_path / "script.py", code=code, **around).stdout == f"{times}\n"


@pytest.mark.parametrize(
    ("end", "left"),
    [("pass", "done"), ("sys.exit(0)", "done"), ("os._exit(0)", None), ("1/0", None)],
)
@pytest.mark.sampled
def test_a_script_leaves_a_result_when_it_has_come_to_its_end(
    tmp_path: Path, end: str, left: str | None
) -> None:
    run_script(
        tmp_path / "script.py",
        code=f"import os, sys\n{end}",
        KDIST_SCRATCH=str(tmp_path),
        LOCAL_RANK="1",
    )
    assert result.read_result(tmp_path, 1) == left


def test_a_script_is_the_main_module_and_ends_as_an_interpreter_does(tmp_path: Path) -> None:
    code = """
        import atexit, pickle, sys, threading, time
        class Own: pass
        atexit.register(lambda: print("exit handler"))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        assert isinstance(pickle.loads(pickle.dumps(Own())), Own)
        assert sys.modules["__main__"].Own is Own and __name__ == "__main__"
        print(sys.argv[1:], end=" ")
    """
    ended = run_script(tmp_path / "script.py", "--lr", "0.1", code=code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "['--lr', '0.1'] thread\nexit handler\n"


def test_a_module_runs_as_under_python_m_with_its_package_and_the_working_folder_to_import_from(
    tmp_path: Path,
) -> None:
    package = tmp_path / "tools"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("WORD = 'found'")
    (package / "__main__.py").write_text(
        "import sys\nfrom .words import WORD\nprint(__name__, WORD, sys.argv[1:])"
    )
    command = [sys.executable, "-m", "kdist_trainer.run_script", "-m", "tools", "--lr", "0.1"]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("__main__ found ['--lr', '0.1']\n", "")
    command[4] = "nowhere.at.all"
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert ended.returncode == 1
    assert "No module named 'nowhere'" in ended.stderr


@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("def f(:", 1, "SyntaxError"),
        (
            "import sys; sys.excepthook = lambda *a: print('hooked', file=sys.stderr)\n1/0",
            1,
            "hooked",
        ),
    ],
)
@pytest.mark.sampled
def test_a_script_ends_with_the_code_that_python_gives(
    tmp_path: Path, code: str, status: int, printed: str
) -> None:
    ended = run_script(tmp_path / "script.py", code=code)
    assert ended.returncode == status
    assert printed in ended.stderr
    assert "kdist_trainer" not in ended.stderr


@pytest.mark.parametrize(
    ("leave", "recorded"),
    [("sys.exit(1)", True), ("sys.exit(3)", False), ("raise SystemExit(1) from None", False)],
)
@pytest.mark.sampled
def test_an_error_that_a_framework_prints_before_it_exits_is_the_failure(
    tmp_path: Path, leave: str, recorded: bool
) -> None:
    code = f"""
        import sys
        try:
            raise ConnectionError("Connection closed by peer")
        except ConnectionError:
            {leave}
    """
    run_script(tmp_path / "script.py", code=code, KDIST_SCRATCH=str(tmp_path), LOCAL_RANK="0")
    left = list(tmp_path.glob("**/*failure*"))
    assert any("ConnectionError" in path.read_text() for path in left) is recorded


def test_a_failing_script_leaves_its_failure_for_the_agent(tmp_path: Path) -> None:
    run_script(
        tmp_path / "script.py",
        code="raise ValueError('odd')",
        KDIST_SCRATCH=str(tmp_path),
        LOCAL_RANK="1",
        RANK="5",
    )
    left = json.loads((tmp_path / "rank-1.failure.json").read_text())
    assert left["cause"] == "user_code"
    assert left["code"] == 70
    assert left["rank"] == 5
    assert left["message"] == "ValueError: odd"
