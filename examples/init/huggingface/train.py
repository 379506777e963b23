"""Hugging Face's `Trainer` on a small GPT-2 that learns to sort digits. With kdist's callback it
goes on at the last checkpoint after a failure or a stop; under torchrun the callback does nothing.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from kdist_trainer.integrations import KdistTrainerCallback

DIGITS = 6


class Sorting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Some digits, then the same digits in order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        digits = torch.randint(0, 10, (DIGITS,), generator=torch.Generator().manual_seed(index))
        ids = torch.cat([digits, digits.sort().values])
        labels = ids.clone()
        labels[:DIGITS] = -100  # only the answer is learned
        return {"input_ids": ids, "labels": labels}


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=10,
        n_positions=2 * DIGITS,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def train(steps: int) -> float:
    """Train the model; returns the mean of the losses."""
    set_seed(0)
    # The same folder for all ranks; what a restart needs is in the job's checkpoints.
    output = Path(tempfile.gettempdir()) / f"output-{os.environ.get('MASTER_PORT', '0')}"
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        logging_steps=5,
        save_strategy="no",  # the callback says when
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        make_model(),
        arguments,
        train_dataset=Sorting(4096),
        callbacks=[KdistTrainerCallback()],
    )
    return trainer.train().training_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
