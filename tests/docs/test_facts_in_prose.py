"""Numbers, names and lists that sentences of the documentation repeat are those of the code; the
sentences are in `facts`. Whoever changes such a fact is told the page and what it has to say.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, Final, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from kdist import __version__, backends
from kdist.backends.operators import OPERATORS
from kdist.bench.command import _COLLECTIVES
from kdist.bench.command import command as bench
from kdist.convert import launch
from kdist.convert.command import command as convert
from kdist.convert.manifests import convert_files
from kdist.convert.values import KEPT
from kdist.convert.workloads import KINDS as CONVERTED
from kdist.crd.definition import _COLUMNS, ConditionType
from kdist.drill.command import command as drill
from kdist.drill.faults import FAULTS
from kdist.errors import Code
from kdist.job.goals import GOALS
from kdist.job_file.folder import _EXCLUDED
from kdist.render import find_pods
from kdist.render.packages import _SAFETENSORS
from kdist.render.storage import fit
from kdist.spec.models import _RESERVED_PREFIXES, NO_BUCKET, Checkpoints
from kdist_controller.metrics import Metrics
from kdist_trainer.agent.hangs import Watchdog
from kdist_trainer.agent.restart_policy import _backoff_seconds
from kdist_trainer.causes.host import SHARED_MEMORY
from kdist_trainer.checkpoint.interval import choose_seconds
from kdist_trainer.config import CREDENTIAL_VARIABLES, Exit
from kdist_trainer.config.sources import AUTHORIZATION, HUB_TOKEN, UrlSource
from kdist_trainer.distributed.measure import COLLECTIVES
from kdist_trainer.formats import OBJECT_STORES
from kdist_trainer.formats.requirements import REQUIREMENTS
from kdist_trainer.object_store.errors import _HINTS
from kdist_trainer.processes.signals import kill_deadline
from tests.charts.rules import controller_alerts
from tests.docs.blocks import DOCS, PAGES
from tests.docs.facts import FACTS
from tests.house.tree import ROOT, files
from tests.manifests.jobs import FULL, load, place
from tests.trainer.metrics.scrape import BASE_SERIES, SERIES_OF_A_RANK

COUNTED: Final = (
    "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
WORDS: Final = COUNTED.split()
NTH: Final = {1: "first", 2: "second", 3: "third", 4: "fourth", 5: "fifth"}
TIMES: Final = {
    30.0: "half a minute",
    60.0: "a minute",
    1800.0: "half an hour",
    3600.0: "an hour",
    86_400.0: "a day",
}


class Shown:
    """A fact as a sentence says it: the format names how."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __format__(self, how: str) -> str:
        """In words or digits."""
        value = self.value
        number = value.total_seconds() if hasattr(value, "total_seconds") else value
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        spoken: dict[str, Callable[[], object]] = {
            "": lambda: f"{number:,}" if isinstance(number, int) else number,
            "digits": lambda: number,
            "word": lambda: in_words(number),
            "minutes_word": lambda: in_words(number / 60),
            "nth": lambda: NTH.get(number, number),
            "times": lambda: {1: "once", 2: "twice"}.get(number, f"{in_words(number)} times"),
            "time": lambda: say_time(number),
            "past": lambda: re.sub("^an? ", "", say_time(number)),
            "minutes": lambda: f"{number / 60:.12g} minutes",
            "short": lambda: f"{number / 60:.12g}m",
            "size": lambda: f"{number / size:.12g} {'GiB' if size > 1 << 20 else 'MiB'}",
            "quantity": lambda: re.sub(r"(\d+)(\w+)", r"\1 \2B", number),
            "version": lambda: ".".join(map(str, number)),
            "needed": lambda: value.partition(">=")[2],
            "or": lambda: " or ".join(map(str, number)),
            "len": lambda: in_words(len(number)),
            "twice": lambda: f"{2 * number}, {4 * number}",
            "double": lambda: 2 * number,
            "share": lambda: {0.1: "a tenth", 1.25: "a quarter", 1.5: "half"}.get(value, value),
            "memory": lambda: in_words(round(1 / (1 - value))),
            "rate": lambda: in_words(1 / value),
            "digest": lambda: "{} of {} bits".format(*number.upper().split("_")),
        }
        size = 1 << 30 if isinstance(number, int) and number >= 1 << 30 else 1 << 20
        return str(spoken[how]())


def in_words(number: float) -> str:
    """A small number as a word."""
    return WORDS[int(number)] if number in range(len(WORDS)) else f"{number:g}"


def say_time(seconds: float) -> str:
    """A duration as a sentence has it."""
    if seconds in TIMES:
        return TIMES[seconds]
    amount, unit = (seconds / 60, "minute") if seconds >= 60 else (seconds, "second")
    return f"{in_words(amount)} {unit}{'s' * (amount != 1)}"


def find(place: str) -> Any:
    """The value at a place."""
    module, _, path = place.partition(":")
    found: Any = resolve_name(f"kdist_trainer{module}" if module.startswith(".") else module)
    for name in path.split("."):
        if isinstance(found, type) and issubclass(found, BaseModel):
            found = found.model_fields[name].get_default(call_default_factory=True)
        elif isinstance(found, Mapping):
            found = found[name]
        else:
            found = getattr(found, name)
    return found


def read(page: str) -> str:
    """A page, its lines joined."""
    return " ".join((DOCS / page).read_text().split())


def test_a_sentence_says_what_the_code_has() -> None:
    wrong = []
    for page, rows in FACTS.items():
        text = read(page)
        for template, *places in rows:
            sentence = template.format(*(Shown(find(place)) for place in places))
            if sentence not in text:
                wrong.append(f"{page} has to say: {sentence} ({', '.join(places)})")
    assert wrong == []


def list_words(names: list[str]) -> str:
    *first, last = names
    return " and ".join(filter(None, (", ".join(first), last)))


KINDS: Final = [backends.get(each) for each in backends.NAMES]
SCALED: Final = [each for each in KINDS if not each.scalable]
FIXED: Final = [each for each in KINDS if each.scalable]
NEEDED: Final = (*REQUIREMENTS.values(), _SAFETENSORS)
LISTS: Final = (
    (
        "how-to/bench.md",
        f"The collectives are {list_words([f'`{each}`' for each in _COLLECTIVES])}",
        "kdist.bench.command:_COLLECTIVES",
    ),
    (
        "how-to/running-jobs.md",
        f"`kdist wait NAME --for={'|'.join(GOALS)}`",
        "kdist.job.goals:GOALS",
    ),
    (
        "how-to/running-jobs.md",
        f"{list_words([each.kind for each in SCALED])} can be scaled while they run; for a "
        + " or a ".join(each.kind for each in FIXED),
        "kdist.backends:Backend.scalable",
    ),
    (
        "how-to/elastic-jobs.md",
        f"The kinds {list_words([f'`{each.name}`' for each in SCALED])} can be resized while they "
        f"run; {list_words([f'`{each.name}`' for each in FIXED])} cannot",
        "kdist.backends:Backend.scalable",
    ),
    (
        "how-to/controller.md",
        "`kubectl get trainingjobs -o wide` also shows the columns "
        + list_words([name for name, _, _, priority in _COLUMNS if priority]),
        "kdist.crd.definition:_COLUMNS",
    ),
    (
        "how-to/kubernetes.md",
        "it needs " + list_words(sorted(f"`{re.split('[>=]', each)[0]}`" for each in NEEDED)),
        "kdist_trainer.formats.requirements:REQUIREMENTS",
    ),
)


@pytest.mark.parametrize(("page", "sentence", "place"), LISTS, ids=lambda each: str(each)[-30:])
def test_a_list_in_a_sentence_is_that_of_the_code(page: str, sentence: str, place: str) -> None:
    assert sentence in read(page), f"{page} has to say: {sentence} ({place})"


def test_the_conditions_of_a_trainingjob_are_those_of_its_page() -> None:
    table = (DOCS / "how-to/controller.md").read_text().partition("| condition | true when |")[2]
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [*get_args(ConditionType)]


def test_the_metrics_of_the_controller_are_those_of_its_page() -> None:
    metrics = Metrics(lambda: (), lambda: 0, lambda: 0, list)
    metrics.show_refused(dict)
    page = (DOCS / "how-to/controller.md").read_text()
    named = re.findall(r"^\| `(kdist_controller_\w+)` \|", page, re.MULTILINE)
    kept = {family.name for family in metrics.registry.collect()}
    assert {each.removesuffix("_total") for each in named} == kept


def test_the_alerts_about_the_controller_are_those_of_its_page() -> None:
    page = (DOCS / "how-to/controller.md").read_text()
    linked = re.findall(r"\[`(\w+)`\]\(\.\./reference/runbooks\.md#(\w+)\)", page)
    assert {name for name, _ in linked} == controller_alerts().keys()
    assert [each for each in linked if each[0].lower() != each[1]] == []


def test_every_exit_code_in_a_sentence_is_one_of_the_tables() -> None:
    of_others = {126, 127, 137}
    known = {int(each) for each in (*Code, *Exit)} | of_others
    written = r"exit codes? (\d+)|(?:exits?|ends?) with (\d+)\b(?! ranks)|\((6[4-9]|7\d|20\d)\)"
    found = {
        (page.name, int(code))
        for page in PAGES
        for each in re.findall(written, page.read_text())
        for code in filter(None, each)
    }
    assert {code for _, code in found} >= {Code.JOB_FAILED, Exit.USER, Exit.STOPPED}
    assert {each for each in found if each[1] not in known} == set()


def test_pages_name_the_versions_of_frameworks_and_operators_that_the_code_needs() -> None:
    project = tomllib.loads((ROOT / "trainer/pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    page = read("how-to/frameworks.md")
    for name in ("transformers", "lightning", "accelerate"):
        assert " ".join(f"'{each}'" for each in extras[name]) in page, name
    named = [each.project.split(" ", 1)[-1] for each in OPERATORS.values() if "." in each.project]
    assert len(named) == 2
    for page in ("how-to/kubernetes.md", "how-to/migrating.md", "explanation/comparison.md"):
        assert [each for each in named if each not in read(page)] == [], page


BUILT: Final = {
    "Kueue": "sigs.k8s.io/kueue",
    "JobSet": "sigs.k8s.io/jobset",
    "Trainer": "github.com/kubeflow/trainer",
    "training-operator": "github.com/kubeflow/training-operator",
    "Prometheus operator": "github.com/prometheus-operator/prometheus-operator",
    "Prometheus": "github.com/prometheus/prometheus",
}
"""By its name on pages, the module of a program that tests/cluster builds."""


def test_pages_name_the_versions_of_operators_that_the_tests_build() -> None:
    lists = "\n".join(path.read_text() for path in files() if path.name == "go.mod")
    versions = {}
    for name, module in BUILT.items():
        (number,) = re.findall(rf"^\t{module}(?:/v\d+)? v(\d+\.\d+)", lists, re.MULTILINE)
        versions[name] = number
    minor = int(versions["Prometheus"].partition(".")[2])  # v0.313 is Prometheus 3.13
    versions["Prometheus"] = f"{minor // 100}.{minor % 100}"
    written = rf"\b({'|'.join(BUILT)}) (\d+\.\d+)(?! or (?:later|newer))"
    found = {(page.name, *each) for page in PAGES for each in re.findall(written, page.read_text())}
    assert {name for _, name, _ in found} == BUILT.keys()
    assert {each for each in found if each[2] != versions[each[1]]} == set()
    script = (ROOT / "tests/cluster/cluster").read_text()
    (number,) = re.findall(r"^KUBERNETES=(\d+\.\d+)", script, re.MULTILINE)
    assert f"run with Kueue {versions['Kueue']} on Kubernetes {number}." in read("how-to/queues.md")


def test_collectives_and_their_factors_are_those_of_the_trainer_in_help_and_page() -> None:
    assert [*COLLECTIVES] == _COLLECTIVES
    marks = r"\\b|\x08"  # of click's paragraphs, as they are written and as they are read
    words = " ".join(re.sub(marks, "", str(bench.help)).split())
    assert f"Collectives: {' '.join(COLLECTIVES)} Examples:" in words
    of_four = {"2 (n - 1) / n": 1.5, "(n - 1) / n": 0.75, "1": 1.0}
    page = (DOCS / "how-to/bench.md").read_text().replace("\N{MINUS SIGN}", "-")
    table = page.partition("| collective | factor |")[2]
    rows = re.findall(r"^ *\| (`.+?) \| (.+?) \|$", table.partition("\n\n")[0], re.MULTILINE)
    said = {name: of_four[row[1]] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    factors = {name: each.factor(4) for name, each in COLLECTIVES.items() if each.sized}
    assert said == factors
    first, second = (
        list_words([name for name, factor in factors.items() if factor == number])
        for number in (1.5, 0.75)
    )
    assert f"2(n-1)/n for {first}, (n-1)/n for {second}, and 1 for the others" in words


def test_help_and_page_of_convert_name_every_kind_that_it_reads() -> None:
    names = {"Volcano's Job" if "volcano" in group else kind for group, kind in CONVERTED}
    (helped,) = re.findall(r"FILEs have manifests: (.+?);", " ".join(str(convert.help).split()))
    page = read("how-to/migrating.md")
    (told,) = re.findall(r"it reads (.+?), or a command line", page)
    for listed in (helped, re.sub(r"\ban? ", "", told)):
        assert {*listed.replace(" with its runtime", "").split(", ")} == names
    titles = " ".join(
        re.findall(r"^## (From .+)$", (DOCS / "how-to/migrating.md").read_text(), re.MULTILINE)
    )
    assert [name for name in names if name not in titles] == []


def takes(scheme: str, **field: str) -> bool:
    """Whether a URL of this scheme may have the field."""
    try:
        UrlSource(url=f"{scheme}://owner/name", **field)
    except ValidationError:
        return False
    return True


def test_the_tables_of_urls_say_what_each_may_have_and_name_the_variables_of_its_secret() -> None:
    page = (DOCS / "how-to/data-and-checkpoints.md").read_text()
    for title, schemes in (
        ("what is fetched", {*CREDENTIAL_VARIABLES}),
        ("`endpoint`", {*OBJECT_STORES}),
    ):
        (table,) = re.findall(
            rf"^\| `url` \| {title} \|.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL
        )
        rows = [line.split(" | ") for line in table.splitlines()[2:]]
        found = {scheme: row for row in rows for scheme in re.findall(r"`(\w+)://", row[0])}
        assert found.keys() == schemes
        for scheme, row in found.items():
            taken = [takes(scheme, endpoint="https://h.example"), takes(scheme, region="eu")]
            assert [each == "yes" for each in row[-3:-1]] == taken, scheme
            assert (*re.findall(r"`([A-Z_]+)`", row[-1]),) == CREDENTIAL_VARIABLES[scheme]
    first, *others = (f"{each}://" for each in OBJECT_STORES)
    words = f"`{first}BUCKET/NAME` ({', '.join(f'`{each}`' for each in others)})"
    assert words in read("how-to/training.md")
    words = f"`{HUB_TOKEN}` for `hf://`, and `{AUTHORIZATION}`, the value of"
    assert words in read("how-to/training.md")


def test_faults_of_programs_in_the_runbook_are_those_that_the_code_leaves_out() -> None:
    source = (ROOT / "trainer/kdist_trainer/causes/gpu.py").read_text()
    (numbers,) = re.findall(r"\(\?!\(\?:([\d|]+)\)", source)
    *first, last = numbers.split("|")
    assert f"Xid {', '.join(first)} and {last} are those of programs" in read(
        "reference/runbooks.md"
    )


def test_the_page_about_scripts_says_how_the_waits_between_restarts_grow() -> None:
    waits = ", ".join(str(_backoff_seconds(times)) for times in (2, 3, 4))
    assert f"further ones come after {waits} s and so on" in read("how-to/scripts.md")


def test_the_page_about_scripts_says_how_long_a_script_has_after_a_spot_notice() -> None:
    page = read("how-to/scripts.md")
    (given,) = re.findall(r"with `terminationGracePeriodSeconds: (\d+)` and", page)
    assert f"a script has {kill_deadline(0.0, float(given)):g} s of them" in page


def test_the_tiers_of_ci_are_those_that_contributing_names() -> None:
    called = {*re.findall(r"\bmake (\w+) AGAIN", (ROOT / ".ci/run").read_text())}
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("`make compat`")[0]
    assert called == {*re.findall(r"`make (\w+)`", page)} - {"setup", "lint", "fast"}


def test_the_options_of_torchrun_in_the_table_are_those_that_convert_reads() -> None:
    page = (DOCS / "how-to/migrating.md").read_text()
    table = page.partition("| torchrun | kdist |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.count("|") > 1]
    named = {name for row in rows for name in re.findall(r"`--([a-z-]{3,})", row)}
    words = ", ".join(f"`{each}`" for each in launch._RANK_PER_GPU)
    assert f"| `--nproc-per-node 8`, {words} |" in table
    read_here = {*launch._NUMBERS, *launch._SIZES}
    assert named >= {"nnodes", "nproc-per-node", "max-restarts"}
    assert {each for each in named - read_here if not launch._NEEDLESS.fullmatch(each)} == set()


def test_the_tables_about_migrating_name_the_fields_that_convert_writes() -> None:
    shapes = ROOT / "tests/cli/convert/manifests"
    found = [each for path in sorted(shapes.iterdir()) for each in convert_files(str(path))[0]]
    written: dict[str, set[str]] = {}
    for value, outcome in (pair for each in found for pair in each.values):
        if outcome.kind == KEPT and (field := re.match(r"spec\.(\w+)", outcome.text)):
            written.setdefault(str(value.path[-1]), set()).add(field[1])
    page = (DOCS / "how-to/migrating.md").read_text().splitlines()
    said: dict[str, str] = {}
    for row in (line.split("|") for line in page if line.startswith("| ")):
        for name in re.findall(r"`(?:\w+\.)*(\w+)[`:]", row[1]):
            said[name] = said.get(name, "") + row[2] + (row[1] if "the same" in row[2] else "")
    assert len(said.keys() & written.keys()) > 10
    wrong = {
        name: [each for each in written[name] if not re.search(rf"\b{each}\b", said[name])]
        for name in said.keys() & written.keys()
    }
    assert {name: missing for name, missing in wrong.items() if missing} == {}


def test_the_page_about_job_files_names_the_prefixes_of_reserved_variables() -> None:
    written = ", ".join(f"`{each}*`" for each in _RESERVED_PREFIXES)
    assert f"`MASTER_ADDR`, …, {written})" in read("reference/job-yaml.md")


def test_pages_about_metrics_say_how_many_series_an_agent_has_at_most() -> None:
    each, more = BASE_SERIES, SERIES_OF_A_RANK
    assert f"at most {each} + {more} x local ranks series" in read("reference/metrics.md")
    assert f"at most {each} + {more} per rank" in read("reference/chart.md")


def test_help_and_page_of_drill_explain_each_fault() -> None:
    page = (DOCS / "how-to/drill.md").read_text()
    table = page.partition("## The faults")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*FAULTS]
    explained = str(drill.help).partition("Faults:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^ *(\w+) {2,}", explained, re.MULTILINE) == [*FAULTS]


def test_the_page_about_security_says_what_a_pod_is_confined_to() -> None:
    (pod,) = [pod for each in place(load(FULL)) for pod in find_pods(each.document)]
    context = pod["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    seccomp = context["seccompProfile"]["type"]
    page = read("explanation/security.md")
    confined = "a number, not root; no capabilities; no privilege escalation"
    assert f"| {confined}; seccomp `{seccomp}` |" in page
    assert "| the root is read-only; `/tmp`, `/run/kdist` and `/dev/shm` are writable;" in page
    empty = {each["name"] for each in pod["spec"]["volumes"] if "emptyDir" in each}
    for container in pod["spec"]["containers"]:
        mounts = [each for each in container["volumeMounts"] if each["name"] in empty]
        writable = {each["mountPath"] for each in mounts if not each.get("readOnly")}
        assert writable >= {"/tmp", "/run/kdist", "/dev/shm"}  # noqa: S108 - in the pod
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False


def test_the_page_about_checkpoints_computes_intervals_as_the_code_does() -> None:
    hour, day = (
        choose_seconds(cost=1.0, duration=2.0, between_losses=seconds, went_back=True)
        for seconds in (3600.0, 86_400.0)
    )
    page = read("how-to/data-and-checkpoints.md")
    assert f"a failure an hour that is {hour:.0f} s; with a failure a day, {day:.0f} s" in page


def test_pages_say_how_much_more_a_volume_holds_and_a_slow_phase_may_take() -> None:
    assert fit("16Mi") == "17Mi"
    assert "may take up a sixteenth more" in read("how-to/data-and-checkpoints.md")
    rank: Any = SimpleNamespace(
        snapshots=[SimpleNamespace(count=0, phase=None)], _from_start=True, _hang_seconds=1e6
    )
    assert Watchdog._allowed_seconds(rank, 0) == 2e6
    said = "Start-up, restoring and saving get at least twice as long"
    assert said in read("how-to/debugging-a-hang.md")


def test_the_health_check_for_argo_cd_reads_conditions_that_there_are() -> None:
    named = set(re.findall(r'\bis\("(\w+)"', read("how-to/gitops.md")))
    named |= set(re.findall(r"\bfound\.(\w+)", read("how-to/gitops.md")))
    assert len(named) >= 5
    assert named <= {*get_args(ConditionType)}


def test_the_readme_shows_the_accuracy_that_the_demo_asks_for() -> None:
    demo = (ROOT / "examples/demo.py").read_text()
    (asked,) = re.findall(r"^ACCURACY = ([\d.]+)$", demo, re.MULTILINE)
    assert f", at least {float(asked):.0%}" in read("../README.md")


def test_the_page_about_gpus_says_how_large_shared_memory_may_grow() -> None:
    template = (ROOT / "cli/kdist/manifests/_pod.yaml.j2").read_text()
    (field,) = re.findall(r'medium: Memory, sizeLimit: \{\{ field\("spec\.([\w.]+)"\)', template)
    assert f"it may grow up to `{field}`" in read("how-to/gpu.md")
    assert f"raise spec.{field}, of which /dev/shm is a part" in SHARED_MEMORY


IMAGE: Final = re.compile(r"\bkdist(?:-trainer|-controller)?:(\d+\.[\w.+-]*)")


def test_every_image_of_kdist_and_every_version_is_that_of_the_code() -> None:
    """`__version__` of the three distributions is compared by tests/house/test_lock.py."""
    shown = [
        path
        for path in files()
        if path.relative_to(ROOT).parts[0] in {"README.md", "docs", "examples", "charts", "cli"}
        and path.suffix in {".md", ".yaml", ".py", ".ipynb", ".tpl", ".json"}
    ]
    found = {
        (str(path.relative_to(ROOT)), tag)
        for path in shown
        for tag in IMAGE.findall(path.read_text())
    }
    assert {path.split("/")[0] for path, _ in found} >= {"docs", "examples"}
    assert {each for each in found if each[1] != __version__} == set()
    assert f"kdist is at version {__version__}" in read("how-to/upgrading.md")
    chart = yaml.safe_load((ROOT / "charts/kdist/Chart.yaml").read_text())
    semantic = re.sub(r"\.(dev|rc)(\d+)$", r"-\1.\2", __version__)
    assert (chart["version"], chart["appVersion"]) == (semantic, __version__)
    assert f"Version {__version__}." in (ROOT / "CHANGELOG.md").read_text()


def test_texts_about_buckets_name_every_object_store() -> None:
    descriptions = [
        str(model.model_fields["url"].description) for model in (Checkpoints, UrlSource)
    ]
    for scheme in OBJECT_STORES:
        assert [text for text in (NO_BUCKET, *descriptions) if f"{scheme}://" not in text] == []
    assert _HINTS.keys() == set(OBJECT_STORES)


def test_the_page_names_the_folders_that_are_never_sent() -> None:
    (named,) = re.findall(r"Hidden files, (.+?) and what", read("how-to/kubernetes.md"))
    assert set(re.findall(r"`(\w+)`", named)) == _EXCLUDED
