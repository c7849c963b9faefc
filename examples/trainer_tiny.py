"""A Trainer run turns to inf: tried on a tiny model, tokenizer and dataset that were made a moment before.

    pip install accelerate    # which transformers' Trainer needs
    python examples/trainer_tiny.py

It prints:

    [...]
    inf in the parameter weight of model.layers.1.mlp.down_proj (Linear), step 2,
      optimizer
    [...]
    The parameter model.layers.1.mlp.down_proj.weight became inf in the optimizer
    step 2; the forward before it was finite.
    hint: lower the learning rate, clip gradients, look at the optimizer's eps in
          this dtype, and at code that changes weights after the step
    [...]
    Detected inf/nan during batch_number=3
    [...]
                      model.layers.0.mlp.down_proj Linear
    [...]
                      model.layers.1.mlp.down_proj Linear
    1.04e+01      inf weight
    [...]
    9.20e-01      inf output
    [...]
    in the folder of the run: overflow_report.html overflow_report.json
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here comes from the hub

from datasets import disable_progress_bars, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from mldebug import NumericsError, OverflowCallback, tiny_dataset, tiny_model, tiny_tokenizer

TEXTS = ["the quick brown fox", "jumps over", "the lazy dog", "and again", "again and again " * 4, "the fox sleeps"]


class Spoil(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            model.model.layers[1].mlp.down_proj.weight.data.mul_(1e6)  # break it


def prepare(folder):
    """Stands for the real model, tokenizer and data: a folder, a file or the name of a repository."""
    (folder / "real").mkdir()
    real = ByteLevelBPETokenizer()
    real.train_from_iterator(TEXTS, vocab_size=400, special_tokens=["<pad>"], show_progress=False)
    real.save(str(folder / "real" / "tokenizer.json"))
    (folder / "real.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 50))


def main(folder):
    prepare(folder)
    tiny_tokenizer(folder / "real", 300, folder / "tokenizer")
    tiny_dataset(folder / "real.jsonl", 12, folder / "data", rows="cover")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", pad_token="<pad>")
    model = tiny_model("llama", layers=2, vocab=len(tokenizer), dtype="float16").model
    data = load_dataset(str(folder / "data"), split="train", cache_dir=folder / "cache")
    data = data.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
    arguments = TrainingArguments(
        str(folder / "run"), per_device_train_batch_size=2, max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="no", dataloader_pin_memory=False, optim="sgd",
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[OverflowCallback(), Spoil()],
    )  # fmt: skip
    try:
        trainer.train()
    except NumericsError:  # the report has been printed
        print("in the folder of the run:", *sorted(path.name for path in (folder / "run").iterdir()))


if __name__ == "__main__":
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
