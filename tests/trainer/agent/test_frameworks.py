"""Training scripts of Hugging Face and Lightning, as they are: their all-reduces are shown, and
nothing that nobody knows.

A Prometheus with the chart's alerts scrapes each for its whole length; `for` and the least age of a
job are shorter. Models are made of configs, with random weights.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.charts.monitored import scraping
from tests.charts.rules import hasten
from tests.trainer.agent.lab import Lab
from tests.trainer.agent.test_scripts import check_that_nothing_is_claimed, read_metrics
from tools.dashboards.prometheus import Window

HUGGING_FACE = """
import os, pathlib, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Enough(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        flag = torch.tensor(float(pathlib.Path(os.environ["LAB"], "enough").exists()))
        torch.distributed.broadcast(flag, 0)
        control.should_training_stop = bool(flag)

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16
    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=os.environ["LAB"] + "/output", per_device_train_batch_size=4, max_steps=1 << 18, \
use_cpu=True,
    report_to=[], save_strategy="no", logging_steps=50,
)
Trainer(model, arguments, train_dataset=Words(), callbacks=[Enough()]).train()
print("trained to its end", flush=True)
"""

LIGHTNING = """
import os, pathlib, pytorch_lightning as lightning, torch
from torch import nn

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    def training_step(self, batch, _):
        flag = torch.tensor(float(pathlib.Path(os.environ["LAB"], "enough").exists()))
        torch.distributed.broadcast(flag, 0)
        self.trainer.should_stop = bool(flag)
        return self.layers(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", \
max_epochs=1 << 10, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, \
default_root_dir=os.environ["LAB"] + "/output",
)
data = torch.utils.data.TensorDataset(torch.randn(1 << 14, 32))
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
print("trained to its end", flush=True)
"""

SCRAPES = 40
"""Of a training at work, one each second: more than any alert waits here."""


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("code", [HUGGING_FACE, LIGHTNING], ids=["hugging-face", "lightning"])
def test_a_frameworks_script_shows_its_all_reduces_and_nothing_that_nobody_knows(
    tmp_path: Path, code: str
) -> None:
    script, began = tmp_path / "train.py", time.time()
    script.write_text(code)
    rules = hasten(tmp_path, divisor=600)
    for path in rules:
        # the age that goodput counts from
        path.write_text(path.read_text().replace("> 3600", "> 10"))
    lab = Lab(tmp_path, fresh=True, procsPerNode=2, script={"path": str(script)})
    with scraping(tmp_path, rules) as (prometheus, targets), lab:
        lab.start("node-0", HF_HUB_OFFLINE="1")
        reported = 'kdist_collectives_total{kdist_job="lab",op="all_reduce",rank="1"}'
        note = tmp_path / "node-0" / "agent.json"
        lab.wait(note.exists, "the start of the agent")
        targets.write_text(json.dumps([listed(json.loads(note.read_text())["port"])]))
        lab.wait(lambda: reported in read_metrics(lab, "node-0"), "the count of all-reduces")
        running = f"count_over_time({reported}[1h]) >= {SCRAPES}"
        lab.wait(
            lambda: prometheus.instant(running, at=time.time()), "scrapes of the training", 600
        )
        text, enough = read_metrics(lab, "node-0"), time.time()
        lab.tell("enough")
        assert lab.end("node-0") == 0
        assert lab.logs().count("trained to its end") == 2
        log = (tmp_path / "node-0.log").read_text()
        window = Window(began, time.time(), 1)
        goodput = prometheus.range("job:kdist_goodput:ratio_rate1h", window)
        alerts = {
            (one.labels["alertname"], one.labels["alertstate"])
            for one in prometheus.range("ALERTS", window)
            if one.labels["alertname"] != "KdistExporterDown" or one.points[0][0] < enough
        }  # an agent that has ended is a target for another moment here, as no pod would be
    check_that_nothing_is_claimed(text)
    assert alerts == set(), "pending or firing"
    assert goodput == []
    if code is HUGGING_FACE:
        assert re.search(rf"^\[rank0\]: +0%\|.*/{1 << 18} \[", log, re.MULTILINE), (
            "the progress bar of tqdm"
        )


def listed(port: int) -> dict[str, Any]:
    """The agent at this port as a target of Prometheus."""
    return {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": "ml"}}
