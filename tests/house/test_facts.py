"""Templates, the chart, pages and modules with few imports repeat some facts of the code. A test
fails if a fact was changed in one of these places only, or if a sentence has two of them.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import yaml

import kdist.__main__
from kdist import backends
from kdist.agents.metrics import BUSY_PHASES, PHASES
from kdist.api.handle import Goal
from kdist.backends import Backend
from kdist.bench.command import command as bench
from kdist.bench.job import BenchSpec, make_job
from kdist.cluster.streams import PodStreams
from kdist.commands.run import command as run
from kdist.commands.top import command as top
from kdist.diagnose import RULES
from kdist.diagnose.failures import _MEMORY_FIX
from kdist.diagnose.runtime import _REFUSED, find_nothing_wrong
from kdist.drill.command import _FAULTS
from kdist.drill.drill import _ACTIONS
from kdist.drill.faults import _SCRIPT_SECONDS, FAULTS
from kdist.errors import Code
from kdist.events import RANK_PREFIX
from kdist.job.goals import GOALS
from kdist.manifest import own_labels
from kdist.recovery.avoidance import _CONFINED, AVOID_SECONDS
from kdist.recovery.command import command as recover
from kdist.render import find_pods
from kdist.render.context import RENDEZVOUS_PORT
from kdist.render.storage import _OPEN_PORTS
from kdist.report.command import command as report
from kdist.report.text import LABELS
from kdist.spec.validators import (
    INSTALL_FOLDERS,
    OWN_FOLDERS,
    OWN_VOLUMES,
    TRAINER,
)
from kdist.status import pods
from kdist.status.agent_status import (
    _TRAINING_STATES,
    FINISHED_STATES,
    JOINING_STATES,
    RUNNING_STATES,
    STANDBY_STATE,
)
from kdist.views.top import HEADER
from kdist_controller.__main__ import PORT
from kdist_controller.node_recovery import AVOIDANCE
from kdist_trainer.agent.hangs import SCRIPT_SILENT_SECONDS
from kdist_trainer.agent.restart_policy import _LIMITS
from kdist_trainer.agent.tracker_process import PACKAGES
from kdist_trainer.causes import host
from kdist_trainer.config import Cause, Exit, Training
from kdist_trainer.config.exit_codes import CODES
from kdist_trainer.config.workload_options import OPTIONS, names_of
from kdist_trainer.formats import FIRST_RETRYABLE_CODE, METRICS_PORT, prefix_rank
from kdist_trainer.metrics.agent_metrics import STANDBY, STATES
from kdist_trainer.metrics.exporter import _READY_STATES
from kdist_trainer.metrics.rank_metrics import WALL_CATEGORIES, StepPhase
from kdist_trainer.processes import shim
from kdist_trainer.rendezvous.configmap_client import ACCOUNT
from kdist_trainer.rendezvous.exchange import KEY_FILE
from kdist_trainer.tracker.trackers import TRACKERS
from tests.charts.rules import alerts as alerts_of_jobs
from tests.house.tree import ROOT, files, python_files
from tests.manifests.jobs import FULL, load, place
from tools.dashboards.model import (
    GOODPUT,
    NAMED,
    RESTARTED,
    RESTARTS_LEFT,
    SILENT_SECONDS,
    STALLED_SECONDS,
)

OF_OTHERS = {"kdist.dev/monitoring"}
"""Labels that users set on what is theirs."""
IN_TWO_MODULES = {
    "… {} lines are left out: they were not read in time",  # of output, and of a node's log
    "no pair of ranks is slower than the others",  # in the result of a bench, and in an event
    "the loss of step {} is {}",  # an event of a script's loss, and a failure of the managed loop
    "module {} has no attribute {}",  # Python's own words
    "wait timeout after {}ms, keys: {}",  # torch's own words
    "wait timeout after {}ms, keys",
    "{} bytes came instead of {}",  # of a file that is fetched, and of a request to a store
    "it has {} bytes instead of {}",
}
"""Sentences that the command line and the trainer each say of what they measured themselves, and
others with a reason of their own.
"""


def matches(pattern: str, *folders: str) -> Iterator[tuple[Path, str]]:
    """What a pattern finds in the files of these folders that people write: file and match."""
    for path in files():
        inside = path.relative_to(ROOT)
        written = path.suffix not in {".json", ".png", ".svg"} and path.name != "requirements.txt"
        if inside.parts[0] in folders and written:
            yield from ((inside, found) for found in re.findall(pattern, path.read_text()))


def test_every_port_of_an_agent_and_of_the_controller_is_that_of_the_code() -> None:
    folders = ("Dockerfile", "README.md", "charts", "cli", "docs", "examples", "manifests", "tools")
    ports = {str(METRICS_PORT), str(PORT), str(RENDEZVOUS_PORT)}
    found = list(matches(r"\b(?:94|294)\d\d\b", *folders))
    assert [(str(path), port) for path, port in found if port not in ports] == []
    assert {path.parts[0] for path, _ in found} >= {"Dockerfile", "charts", "cli", "docs"}


def test_every_label_in_templates_charts_and_pages_is_one_of_the_code() -> None:
    name = r"\bkdist\.dev/(?!v\d|schemas/)[a-z][a-z-]*"
    code = "\n".join(path.read_text() for path in python_files("cli", "trainer"))
    known = OF_OTHERS | set(re.findall(r'"(kdist\.dev/[a-z-]+)"', code))
    found = list(matches(name, "manifests", "charts", "docs", "examples", "README.md"))
    assert [(str(path), label) for path, label in found if label not in known] == []
    assert {path.parts[0] for path, _ in found} >= {"manifests", "charts", "docs"}


def test_the_chart_and_pages_select_pods_of_trainings_by_labels_that_these_have() -> None:
    labels, component = own_labels("full"), "app.kubernetes.io/component"
    names = (ROOT / "charts/kdist/templates/_names.tpl").read_text()
    blocks = dict(re.findall(r'{{- define "kdist\.(\w+)" -}}\n(.*?)\n{{- end }}', names, re.DOTALL))
    assert yaml.safe_load(blocks["trainings"]).items() <= labels.items()
    page = (ROOT / "docs/how-to/monitoring.md").read_text()
    prefix = r"_pod_label_app_kubernetes_io_component\],\s+regex: "
    assert re.findall(rf"{prefix}(\w+)", page) == [labels[component]]
    page = (ROOT / "docs/how-to/networks.md").read_text()
    assert set(re.findall(rf"{component}: (\w+)", page)) == {labels[component]}
    template = (ROOT / "manifests/network.yaml.j2").read_text()
    (allowed,) = re.findall(rf"{{([^{{}}]*, {component}: \w+)}}", template)
    selected = blocks["ownLabels"].splitlines() + blocks["controllerSelector"].splitlines()
    assert set(allowed.split(", ")) <= set(selected)


def test_exit_codes_are_those_of_the_tables_where_these_are_not_imported() -> None:
    assert (pods.DONE, pods.STOPPED) == (Exit.DONE, Exit.STOPPED)
    assert (pods.PEERS_LOST, pods.HANG) == (Exit.PEERS_LOST, Exit.HANG)
    assert shim._STOPPED == Exit.STOPPED
    ends = {128 + each for each in kdist.__main__._SIGNALS}
    assert ends == {code for code in Code if code > 128}


def test_the_help_of_run_and_a_page_name_the_codes_of_agents() -> None:
    (option,) = [each for each in run.params if each.name == "propagate_exit_code"]
    final = [code for code in Exit if code and not code.retryable]
    others = [code for code in Exit if code.retryable]
    spans = ", ".join(f"{min(codes):d} to {max(codes):d}" for codes in (final, others))
    assert f"({spans})" in str(getattr(option, "help", ""))
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    assert f"from {FIRST_RETRYABLE_CODE} on it can, below it cannot" in page


def test_the_ports_that_every_pod_may_reach_are_named_alike_by_chart_and_pages() -> None:
    chart = (ROOT / "charts/kdist/templates/controller.yaml").read_text()
    of_servers = chart.partition("# The API server, at the ports that clusters give it.")[2]
    listed = re.findall(r"- \{port: (\d+), protocol: TCP\}", of_servers.partition("{{-")[0])
    assert tuple(map(int, listed)) == _OPEN_PORTS
    words = ", ".join(map(str, _OPEN_PORTS[:-1])) + f" and {_OPEN_PORTS[-1]}"
    for page in ("kubernetes.md", "networks.md"):
        assert f"the ports {words}" in (ROOT / "docs/how-to" / page).read_text(), page


def test_the_page_names_the_ports_that_pods_of_one_workload_kind_may_reach_besides() -> None:
    job = load(FULL)
    reached = {}
    for kind in backends.NAMES:
        (policy,) = [each for each in place(job, kind) if each.kind == "NetworkPolicy"]
        reached[backends.get(kind).kind] = {
            port["port"]
            for rule in policy.document["spec"]["egress"]
            for port in rule.get("ports", [])
        }
    common = set.intersection(*reached.values())
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    said = {
        kind: {*map(int, re.findall(rf"Pods of a {kind} may also reach port (\d+)", page))}
        for kind in reached
    }
    assert said == {kind: ports - common for kind, ports in reached.items()}
    assert any(said.values())


def test_images_and_pods_have_one_user_and_one_group() -> None:
    pattern = r"(?:runAsUser|runAsGroup|fsGroup): (\d+)"
    (number,) = {found for _, found in matches(pattern, "charts", "manifests")}
    assert {user for _, user in matches(r"\bUSER (\S+)", "Dockerfile")} == {f"{number}:{number}"}
    assert f"they run as user {number} " in (ROOT / "docs/how-to/kubernetes.md").read_text()


def test_what_a_pod_mounts_is_what_the_overlay_and_the_agent_know() -> None:
    install = {"cache": {"claim": "cache"}, "wheels": {"claim": "wheels"}}
    job = load({**FULL, "spec": {**FULL["spec"], "install": install}})
    data = {each.mount_path for each in job.spec.data}
    for kind in backends.NAMES:
        (pod,) = [pod for each in place(job, kind) for pod in find_pods(each.document)]
        name = backends.get(kind).container
        (trainer,) = [each for each in pod["spec"]["containers"] if each["name"] == name]
        assert name in pods._CONTAINERS
        mounted = {each["mountPath"] for each in trainer["volumeMounts"]}
        assert mounted - data <= {*OWN_FOLDERS, *INSTALL_FOLDERS}, kind
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        assert {each for each in volumes if not each.startswith("data-")} <= {*OWN_VOLUMES}, kind
        assert str(ACCOUNT) in mounted
        assert f"'path': '{KEY_FILE}'" in str(pod["spec"]["volumes"])


def test_the_page_about_dead_nodes_says_when_their_pods_are_evicted() -> None:
    (pod,) = [pod for each in place(load(FULL)) for pod in find_pods(each.document)]
    lost = {
        each["tolerationSeconds"]
        for each in pod["spec"]["tolerations"]
        if each["key"] == "node.kubernetes.io/unreachable"
    }
    page = (ROOT / "docs/how-to/dead-node.md").read_text()
    assert {*map(int, re.findall(r"its pods are evicted (\d+) seconds later", page))} == lost
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    assert {*map(int, re.findall(r"not ready or unreachable for (\d+) seconds", page))} == lost


def test_a_marker_is_confined_as_the_pods_of_the_job() -> None:
    (pod,) = [pod for each in place(load(FULL)) for pod in find_pods(each.document)]
    for container in pod["spec"]["containers"]:
        assert {**container["securityContext"], **_CONFINED} == container["securityContext"]
        assert container["securityContext"].keys() - _CONFINED.keys() == {"privileged"}


def test_pages_say_how_long_a_token_lasts_and_when_a_silent_container_is_restarted() -> None:
    (pod,) = [pod for each in place(load(FULL)) for pod in find_pods(each.document)]
    lasting = {*re.findall(r"'expirationSeconds': (\d+)", str(pod["spec"]["volumes"]))}
    assert lasting == {"3600"}, "security.md and kubernetes.md say: an hour"
    security = (ROOT / "docs/explanation/security.md").read_text()
    assert "with a token of one hour" in security
    assert "pods get a one-hour token" in (ROOT / "docs/how-to/kubernetes.md").read_text()
    (trainer,) = [each for each in pod["spec"]["containers"] if "livenessProbe" in each]
    probe = trainer["livenessProbe"]
    chart = (ROOT / "charts/kdist/templates/controller.yaml").read_text()
    found = re.search(r"livenessProbe:.*?periodSeconds: (\d+).*?Threshold: (\d+)", chart, re.DOTALL)
    assert found is not None
    seconds = (probe["periodSeconds"] * probe["failureThreshold"], int(found[1]) * int(found[2]))
    assert seconds == (60, 120), "security.md says: a minute, two; drill.md: a minute"
    assert "after a minute (agents) or two (controller) without an answer" in security
    drill = (ROOT / "docs/how-to/drill.md").read_text()
    assert "the kubelet restarts a container that is silent for about a minute" in drill


def test_the_goals_of_a_wait_in_python_are_those_of_the_command() -> None:
    assert typing.get_args(Goal) == (*GOALS,)


def test_the_chart_avoids_nodes_as_the_controller_does_by_itself() -> None:
    values = yaml.safe_load((ROOT / "charts/kdist/values.yaml").read_text())
    hours = AVOIDANCE.seconds / 3600
    assert values["controller"]["avoidNodes"] == {"faults": AVOIDANCE.faults, "hours": hours}
    page = (ROOT / "docs/how-to/controller.md").read_text()
    assert f"`controller.avoidNodes: {{faults: {AVOIDANCE.faults}, hours: {hours:.0f}}}`" in page
    assert values["controller"]["replicas"] == 2, "docs/how-to/controller.md says: two replicas"
    assert "Two replicas run, of which one leads" in page


def test_the_container_of_the_ranks_is_found_whatever_the_workload_kind_calls_it() -> None:
    names = {backends.get(name).container for name in backends.NAMES}
    assert names <= set(pods._CONTAINERS)
    assert Backend.container == TRAINER
    reads = (PodStreams.logs, PodStreams.exec, PodStreams.run, PodStreams.session)
    defaults = {signature(each).parameters["container"].default for each in reads}
    assert defaults == {TRAINER}


def test_rules_of_the_chart_find_what_the_command_line_finds() -> None:
    rules = ROOT / "charts/kdist/rules"
    assert f'phase=~"{"|".join(BUSY_PHASES)}"' in (rules / "recording.yaml").read_text()
    alerts = (rules / "alerts.yaml").read_text()
    refused = alerts.partition("- alert: KdistConnectionsRefused")[2]
    assert f"[10m])) > {_REFUSED}\n" in refused
    stalled = alerts.partition("- alert: KdistTrainingStalled")[2].partition("- alert")[0]
    assert f"(kdist_last_step_timestamp_seconds)) > {STALLED_SECONDS[1]})" in stalled
    conditions = {name: str(rule["expr"]) for name, rule in alerts_of_jobs().items()}
    assert f"{SILENT_SECONDS[1]}) and on" in conditions["KdistRankSilent"]
    assert f"job:kdist_goodput:ratio_rate1h < {GOODPUT[1]} " in conditions["KdistGoodputLow"]
    assert (
        f"(kdist_worker_group_restarts_total))) > {RESTARTED[1] - 1} "
        in conditions["KdistRestartLoop"]
    )
    low = conditions["KdistRestartBudgetLow"]
    assert f"(kdist_restarts_remaining) <= {RESTARTS_LEFT[0] - 1} " in low


def test_the_command_line_and_the_dashboards_know_every_phase_and_category_of_time() -> None:
    phases = {phase.name.lower() for phase in StepPhase}
    assert set(PHASES) == phases
    assert set(BUSY_PHASES) == phases - {"comm_exposed", "other"}
    for names in (phases, {*WALL_CATEGORIES}):
        assert names <= NAMED.keys()
        assert len({NAMED[name] for name in names}) == len(names), "a color of its own"


def test_every_state_of_an_agent_is_one_of_a_kind_to_the_command_line_and_to_the_rules() -> None:
    between = ("restarting", "hung")
    kinds = (RUNNING_STATES, JOINING_STATES, FINISHED_STATES, between)
    assert sorted(state for kind in kinds for state in kind) == sorted(STATES)
    assert STANDBY_STATE == STANDBY
    assert set(_TRAINING_STATES) <= set(STATES)
    assert set(RUNNING_STATES) == _READY_STATES
    found = {each for _, each in matches(r'state=~"([^"]*)"', "charts")}
    assert found == {"|".join((*RUNNING_STATES, "hung"))}


def test_the_help_of_the_report_names_every_part_of_the_time() -> None:
    words = " ".join(str(report.help).split())
    assert [label for label in LABELS.values() if label not in words] == []


def test_the_advice_after_an_oom_of_a_machine_is_one_whoever_gives_it() -> None:
    assert host._MEMORY.startswith(f"{_MEMORY_FIX};")


def test_the_prefix_of_a_ranks_lines_is_found_by_the_command_line() -> None:
    found = RANK_PREFIX.match(f"{prefix_rank(7)}text")
    assert found is not None
    assert (found.group(), found.group(2)) == (prefix_rank(7), "7")


def test_every_fault_of_a_drill_can_be_asked_for_and_has_an_action() -> None:
    assert set(_FAULTS) == FAULTS.keys() == _ACTIONS.keys()


def test_the_help_says_for_how_long_a_node_is_avoided() -> None:
    (option,) = [each for each in recover.params if each.name == "duration"]
    assert f"(default: {AVOID_SECONDS / 3600:.0f}h)" in str(getattr(option, "help", ""))


def test_the_help_of_a_bench_says_where_it_runs_without_a_job() -> None:
    sizes = {"min": 1, "max": 1, "factor": 2, "rounds": 1, "warmup": 1}
    spec = make_job(BenchSpec(collective="all_reduce", **sizes, seconds=1, slow=2)).spec
    helps = {each.name: str(getattr(each, "help", "")) for each in bench.params}
    assert f"else {spec.nodes.max})" in helps["nodes"]
    assert f"else {spec.procs_per_node})" in helps["procs_per_node"]


def test_a_drill_waits_for_a_script_as_long_as_its_silence_is_tolerated() -> None:
    assert _SCRIPT_SECONDS == SCRIPT_SILENT_SECONDS


def test_a_tracker_is_in_the_field_the_extras_and_the_table_or_in_none() -> None:
    named = typing.get_args(typing.get_args(Training.model_fields["tracker"].annotation)[0])
    assert set(named) == TRACKERS.keys() == PACKAGES.keys()


def test_every_rule_of_why_is_in_the_order_of_all() -> None:
    rule = re.compile(r"^def (find_\w+)\(ctx: DiagnosticContext\)", re.MULTILINE)
    folder = ROOT / "cli/kdist/diagnose"
    written = {each for path in folder.glob("*.py") for each in rule.findall(path.read_text())}
    assert written == {each.__name__ for each in (*RULES, find_nothing_wrong)}


def test_every_cause_ends_the_run_ends_it_when_it_repeats_or_comes_from_outside() -> None:
    outside = {
        Cause.NETWORK,
        Cause.NODE_LOST,
        Cause.PREEMPTED,
        Cause.PREFLIGHT,
        Cause.RENDEZVOUS,
        Cause.RETRY,
        Cause.STORAGE,
    }
    final = {cause for cause, code in CODES.items() if not code.retryable}
    final |= {Cause.BUDGET, Cause.COLLECTIVE_MISMATCH, Cause.DEADLINE}  # with a code of others
    assert outside & (final | _LIMITS.keys()) == set()
    assert outside | final | _LIMITS.keys() == set(Cause)


def texts(path: Path) -> Iterator[str]:
    """The texts of a module, without its docstrings; a formatted one with `{}` for its values, and
    what it begins with too.
    """
    tree = ast.parse(path.read_text())
    skipped = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        if isinstance(each, ast.JoinedStr):
            parts = [part for part in each.values if isinstance(part, ast.Constant)]
            skipped |= {*map(id, parts)}
            whole = "".join(str(part.value) if part in parts else "{}" for part in each.values)
            yield from {whole.strip(), re.split("[:;] ", whole)[0].strip()}
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield from [each.value.strip()] if id(each) not in skipped else []


def test_a_sentence_is_written_in_one_module() -> None:
    places: dict[str, set[str]] = {}
    for path in python_files("cli", "trainer", "controller"):
        for text in texts(path):
            if len(re.findall(r"\S*[a-z]\S*", text)) >= 4 and len(text) >= 24:
                places.setdefault(text, set()).add(str(path.relative_to(ROOT)))
    twice = {text: found for text, found in places.items() if len(found) > 1}
    assert twice.keys() >= IN_TWO_MODULES
    assert {text: found for text, found in twice.items() if text not in IN_TWO_MODULES} == {}


def test_the_field_of_a_workloads_options_names_those_of_the_shipped_ones() -> None:
    said = Training.model_fields["options"].description or ""
    for name, model in OPTIONS.items():
        model.model_validate({})  # which gives the fields their names in job.yaml
        *most, last = names_of(model)
        assert f"{name} has {', '.join(most)} and {last}" in " ".join(said.split())


def test_the_help_of_top_explains_the_columns_of_times() -> None:
    explained = re.findall(r"^ +([A-Z]+(?: [A-Z]+)*)  ", str(top.help), re.MULTILINE)
    assert tuple(explained) == HEADER[4:-1]
