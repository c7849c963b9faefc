"""hung fork-after-threads 1: a DataLoader worker tokenizes after its parent has started the tokenizer's threads."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

os.environ["TOKENIZERS_PARALLELISM"] = "true"
from tokenizers import Tokenizer, models, pre_tokenizers


def make():
    t = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    return t


class DS(Dataset):
    def __init__(self, tok):
        self.tok = tok

    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = self.tok.encode_batch(["a b a b"] * 64)
        return torch.ones(4) * len(ids)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tok = make()
    if rank == 1:
        tok.encode_batch(["a b c"] * 1000)
    for b in DataLoader(DS(tok), batch_size=4, num_workers=1, multiprocessing_context="fork"):
        dist.all_reduce(b)


main()
