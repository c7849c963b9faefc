"""A tiny GPT-2 under the Trainer, whose MLP bias turns to inf after the second step. The argument is its `debug`."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Spoil(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.transformer.h[1].mlp.c_fc.bias[0] = float("inf")


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    data = [{"input_ids": (ids := torch.randint(3, 64, (8,))), "labels": ids} for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=5, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, debug=" ".join(sys.argv[1:]),
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data, callbacks=[Spoil()]).train()
