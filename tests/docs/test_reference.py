"""The generated pages are fresh and complete; every picture has a command that makes it."""

from __future__ import annotations

import re

import pytest

from kdist import _MODULES
from kdist.app import COMMANDS
from kdist.errors import Code
from kdist.events import SENTENCES
from kdist_trainer.config.exit_codes import Exit
from tests.docs.blocks import DOCS
from tests.house.test_make import TARGETS
from tests.house.tree import ROOT, files
from tools.reference import index, security
from tools.reference.pages import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run: make generate"


def test_the_security_page_has_every_table() -> None:
    page = security.render()
    for name, make in security.TABLES.items():
        assert f"<!-- table of {name}: python -m tools.reference -->\n{make()}\n" in page


def test_the_way_to_report_leads_to_the_security_page() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "## Report a vulnerability" in text
    assert "(docs/explanation/security.md)" in text


def test_every_command_and_every_code_is_in_the_reference() -> None:
    titles = re.findall(r"^### kdist (\S+)$", PAGES["commands.md"](), re.MULTILINE)
    assert titles == [name for section in COMMANDS.values() for name in section]
    listed = re.findall(r"^\| (\d+) \| `(\w+)`", PAGES["exit-codes.md"](), re.MULTILINE)
    every = [*Code.__members__.items(), *Exit.__members__.items()]
    assert listed == [(str(int(code)), name) for name, code in every]


def test_every_event_has_its_sentence() -> None:
    table = PAGES["events.md"]().partition("These have no sentence")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE))
    assert set(rows) == set(SENTENCES)
    # a field that the example lacks would have the event shown as its fields
    assert [name for name, sentence in rows.items() if "=" in sentence] == []


def test_every_name_that_programs_import_is_in_the_reference() -> None:
    page = PAGES["python-api.md"]()
    introduction = page.partition("\n## ")[0]
    described = {*re.findall(r"^## (\w+)$", page, re.MULTILINE)}
    for module, names in _MODULES.items():
        if module.startswith("api."):
            assert described >= {*names.split()}
            described -= {*names.split()}
        else:
            assert {*names.split()} <= {*re.findall(r"`(?:kdist\.)?(\w+)`", introduction)}
    assert described == set()


def test_every_tutorial_and_no_other_is_in_the_list_of_them() -> None:
    folder = DOCS / "tutorials"
    page = (folder / "index.md").read_text()
    listed = re.findall(r"^- \[.+?\]\((\S+)\)", page, re.MULTILINE)
    assert {*listed} == {path.name for path in folder.iterdir()} - {"index.md"}
    built = page.partition(":hidden:\n\n")[2].partition("\n```")[0].split()
    assert [f"{name}.md" for name in built] == [name for name in listed if name.endswith(".md")]
    assert [name for name in listed if f"(docs/tutorials/{name})" not in index.render()] == []


def test_every_picture_is_made_by_a_command() -> None:
    page = (DOCS / "README.md").read_text()
    commands = dict(re.findall(r"^\| `([\w./-]+)` \| `(.+)` \|$", page, re.MULTILINE))
    pictures = {
        str(path.relative_to(DOCS))
        for path in files()
        if path.is_relative_to(DOCS) and path.suffix in {".png", ".svg", ".gif", ".jpg"}
    }
    assert set(commands) == pictures
    for command in commands.values():
        program, *names = command.split()
        if program == "make":
            assert names[0] in TARGETS
        else:
            assert program == "python"
            assert (ROOT / names[-1].replace(".", "/")).is_dir() or (ROOT / names[0]).is_file()
