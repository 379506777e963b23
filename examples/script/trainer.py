"""Hugging Face's `Trainer` with kdist's line: a small GPT-2 with random weights that learns to
sort digits.

    kdist run --procs-per-node 2 examples/script/trainer.py

Kill a rank while it runs: all start again at the last checkpoint. Ctrl-C saves and stops; the same
command goes on. Under torchrun the line does nothing.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from kdist_trainer.integrations import KdistTrainerCallback

DIGITS = 6


class Sorting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Some digits, then the same digits in order."""

    def __init__(self, first: int, size: int) -> None:
        self.first = first
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        digits = torch.randint(0, 10, (DIGITS,), generator=generator)
        ids = torch.cat([digits, digits.sort().values])
        labels = ids.clone()
        labels[:DIGITS] = -100  # only the answer is learned
        return {"input_ids": ids, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", default="output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=10,
        n_positions=2 * DIGITS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )  # its dropout draws random numbers, which a resumed training draws again
    model = GPT2LMHeadModel(config)
    training = TrainingArguments(
        output_dir=arguments.output,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        max_steps=arguments.steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=30,
        save_steps=20,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model,
        training,
        train_dataset=Sorting(0, 1024),
        eval_dataset=Sorting(4096, 64),
        callbacks=[KdistTrainerCallback()],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_state()
        weights = model.state_dict()
        everything = b"".join(weights[name].cpu().numpy().tobytes() for name in sorted(weights))
        print(f"weights {hashlib.sha256(everything).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
