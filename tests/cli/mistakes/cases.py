"""Mistakes that users make, in groups: the command as it is typed, in a folder with the files of
`FILES`, and the exit code. What each prints is in the file `GROUP.txt` next to this one.
"""

from __future__ import annotations

from typing import Final

from tests.cli.conftest import JOB


def _job(old: str, new: str) -> str:
    assert old in JOB
    return JOB.replace(old, new)


def _script(spec: str) -> str:
    return JOB[: JOB.index("  train:")] + spec


_KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: here, user: me}}]
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: me, user: {}}]
"""

FILES: Final[dict[str, str | bytes]] = {
    "job.yaml": JOB,
    "every.yaml": JOB + "    checkpoint:\n      every: 5m\n",
    "no-colon.yaml": _job("epochs: 5", "epochs 2"),
    "no-colon-between.yaml": _job("workload: digits", "workload digits"),
    "gpu.yaml": JOB + "  gpu: 1\n",
    "pytorchjob.yaml": "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: digits}\n"
    "spec:\n  pytorchReplicaSpecs: {}\n",
    "deployment.yaml": "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n"
    "spec: {replicas: 1}\n",
    "list.yaml": "apiVersion: v1\nkind: List\nitems: []\n",
    "old-version.yaml": _job("v1alpha1", "v1"),
    "tabs.yaml": _job("    workload", "\tworkload"),
    "twice.yaml": JOB + "    epochs: 6\n",
    "indented.yaml": _job("    epochs", "   epochs"),
    "outside.yaml": _job("  train:\n    workload", "train:\n    workload"),
    "empty.yaml": "",
    "comments.yaml": "# a job, one day\n",
    "binary.yaml": b"\x7fELF\x02\x01\x01\x00\x00\x00",
    "latin1.yaml": _job("digits\n", "digits # f\u00fcr alle\n").encode("latin-1"),
    "utf16.yaml": JOB.encode("utf-16"),
    "name.yaml": _job("name: digits", "name: My_Digits"),
    "epochs.yaml": _job("epochs: 5", "epochs: five"),
    "typo.yaml": _job("epochs", "epoch"),
    "workload.yaml": _job("workload: digits", "workload: digts"),
    "replicas.yaml": JOB + "  replicas: 2\n",
    "quote.yaml": _job("workload: digits", 'workload: "digits'),
    "no-spec.yaml": JOB[: JOB.index("spec:")],
    "both.yaml": _script("  script: {path: train.py}\n  train: {workload: digits}\n"),
    "neither.yaml": _script("  nodes: 2\n"),
    "data.yaml": JOB + "  data:\n    - path: ./imagse\n      mountPath: /data\n",
    "code.yaml": JOB + "  code: ./sources\n",
    "script.yaml": _script("  script:\n    path: trian.py\n"),
    "broken-script.yaml": _script("  script:\n    path: broken.py\n"),
    "folder-script.yaml": _script("  script:\n    path: pack\n"),
    "module.yaml": _script("  script:\n    module: pack.trian\n"),
    "class.yaml": _job("workload: digits", "workload: model:Compleet"),
    "method.yaml": _job("workload: digits", "workload: model:Partial"),
    "model.yaml": _job("workload: digits", "workload: modle:Complete"),
    "syntax.yaml": _job("workload: digits", "workload: broken:Complete"),
    "two.yaml": JOB + "---\n" + _job("name: digits", "name: letters"),
    "train.py": "print('trains')\n",
    "broken.py": "import torch\n\ndef train(:\n    pass\n",
    "indent.py": "def train():\nreturn 1\n",
    "model.py": "from kdist_trainer.workload import Workload\n\nclass Complete(Workload):\n"
    "    def model(self): ...\n    def dataset(self, split): ...\n"
    "    def loss(self, model, batch): ...\n\nclass Partial(Workload):\n"
    "    def model(self): ...\n",
    "pack/__init__.py": "",
    "pack/train.py": "print('trains')\n",
    "images/one.txt": "an image\n",
    "kube/refused": _KUBECONFIG,
    "kube/rubbish": "{not: [a kubeconfig\n",
    "kube/text": "hello\n",
    "kube/empty": "",
    "kube/no-current": _KUBECONFIG.replace("current-context: here\n", ""),
    "kube/no-cluster": _KUBECONFIG.replace(
        "name: here, cluster: {server", "name: x, cluster: {server"
    ),
    "a-file": "not a folder\n",
}

USAGE, MISSING, UNREACHABLE = 2, 4, 5

# group -> (what is typed after `kdist`, exit code)
MISTAKES: Final[dict[str, tuple[tuple[str, int], ...]]] = {
    "files": tuple(
        (f"validate {name}", USAGE)
        for name in (
            *("every.yaml", "no-colon.yaml", "no-colon-between.yaml", "gpu.yaml"),
            *("pytorchjob.yaml", "deployment.yaml", "list.yaml", "old-version.yaml"),
            *("tabs.yaml", "twice.yaml", "indented.yaml", "outside.yaml", "empty.yaml"),
            *("comments.yaml", "binary.yaml", "latin1.yaml", "utf16.yaml", "name.yaml"),
            *("epochs.yaml", "typo.yaml", "workload.yaml", "replicas.yaml", "quote.yaml"),
            *("no-spec.yaml", "both.yaml", "neither.yaml", "pack", "jbo.yaml"),
            *("nowhere/job.yaml", "loop.yaml", "train.py"),
        )
    ),
    "options": tuple(
        (typed, USAGE)
        for typed in (
            "run job.yaml --node 2",
            "run job.yaml --sets spec.train.epochs=2",
            "run job.yaml --set spec.train.epoch=2",
            "run job.yaml --set spec.train.epochs",
            "run job.yaml --set spec.nodes=x",
            "run job.yaml --set spec.env[3].name=A",
            "run job.yaml --nodes 2:1",
            "run job.yaml --nodes two",
            "run job.yaml --nodes 0",
            "run job.yaml --procs-per-node 0",
            "run job.yaml --procs-per-node all",
            "run job.yaml --lr 0.1",
            "run job.yaml 0.1",
            "run",
            "run job.yaml -o xml",
            "get -o xml",
            "aply job.yaml",
            "run two.yaml",
            "launch job.yaml",
            "status one two",
            "status",
            "logs digits --since 5x",
            "wait digits --timeout soon",
            "wait digits --for=finished",
            "delete",
            "apply",
            "apply pack",
            "apply job.yaml job.yaml",
            "apply job.yaml --dry-run=yes",
            "apply job.yaml --backend jobs --dry-run=client",
            "scale digits",
            "drill digits --rank 1",
            "drill digits --fault fire",
            "completion cmd",
        )
    ),
    "code": tuple(
        (typed, USAGE)
        for typed in (
            "run trian.py",
            "run broken.py",
            "run indent.py",
            "run pack",
            "run script.yaml",
            "run broken-script.yaml",
            "run folder-script.yaml",
            "run module.yaml",
            "run class.yaml",
            "run method.yaml",
            "run model.yaml",
            "run syntax.yaml",
            "run code.yaml",
            "run data.yaml",
            "render code.yaml",
        )
    ),
    "environments": (
        ("explain spec.train.epoch", MISSING),
        ("get --context nowhere --kubeconfig kube/refused", UNREACHABLE),
        ("get -n ml --kubeconfig kube/none", UNREACHABLE),
        ("get -n ml --kubeconfig kube/rubbish", UNREACHABLE),
        ("get -n ml --kubeconfig kube/text", UNREACHABLE),
        ("get -n ml --kubeconfig kube/empty", UNREACHABLE),
        ("get -n ml --kubeconfig kube/no-current", UNREACHABLE),
        ("get -n ml --kubeconfig kube/no-cluster", UNREACHABLE),
        ("get -n ml --kubeconfig kube/refused --timeout 0", UNREACHABLE),
        ("get -n ml -l a,,b=(c --kubeconfig kube/refused --timeout 0", UNREACHABLE),
        ("status digits", MISSING),
        ("logs digits", MISSING),
        ("status digits --local", MISSING),
        ("why ./nowhere", MISSING),
        ("apply job.yaml", UNREACHABLE),
        ("delete digits", MISSING),
        ("KDIST_HOME=a-file run job.yaml", 1),
        ("KDIST_HOME=a-file run train.py", 1),
    ),
}
