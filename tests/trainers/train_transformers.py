"""Train a tiny GPT-2 with the Trainer of transformers, which writes TensorBoard events and `trainer_state.json`."""

# Needs: transformers accelerate tensorboard
import os
from typing import Any

import torch
from logged_values import SEED, LoggedValues
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

RUN, EVENTS = "output", "events"


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def main(logged: LoggedValues) -> None:
    class Recorder(TrainerCallback):
        def on_log(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
        ) -> None:
            logged.add(RUN, {key: value for key, value in logs.items() if key != "epoch"}, state.global_step)

    class RecordedWriter(SummaryWriter):
        def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> None:
            super().add_scalar(tag, scalar_value, global_step, *args, **kwargs)
            logged.add(EVENTS, {tag: scalar_value}, global_step)

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logged.folder / EVENTS)
    torch.utils.tensorboard.SummaryWriter = RecordedWriter
    set_seed(SEED)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(logged.folder / RUN),
        max_steps=8,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=2,
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[Recorder()])
    trainer.train()
    trainer.save_state()
    logged.add_parameters(RUN, {"max_steps": 8, "logging_steps": 1, "train_batch_size": 2})
