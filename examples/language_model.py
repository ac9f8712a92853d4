"""A character language model on 4 workers, and with torch's AdamW in one process.

    python examples/language_model.py [WORKERS EPOCHS]
"""
import argparse
import inspect
import itertools
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import ngsgd
from ngsgd.schedules import Shard
from ngsgd.tasks import DatasetTask

CONTEXT, WIDTH, BATCH = 64, 128, 16

class Characters(Dataset):
    """Windows of the source code of Python's argparse, and the characters that follow."""

    def __init__(self):
        text = inspect.getsource(argparse)
        self.data = torch.tensor([ord(c) for c in text if ord(c) < 128])

    def __len__(self):
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, i):
        return self.data[i * CONTEXT:][:CONTEXT], self.data[i * CONTEXT + 1:][:CONTEXT]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))

    def forward(self, x):
        return self.blocks(self.tokens(x) + self.positions.weight)

def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

def num_tokens(batch):
    return batch[1].numel()

def perplexity(model, batch):
    return {"perplexity": loss_fn(model, batch).exp()}

def make_task():
    return DatasetTask(Characters(), Transformer, loss_fn, weight_fn=num_tokens, metrics_fn=perplexity)

def adamw(task, epochs):
    """The validation loss of an ordinary loop over the same examples."""
    optimizer = torch.optim.AdamW((model := Transformer()).parameters(), 2e-3)
    for epoch, archive in itertools.product(range(epochs), range(task.shards().num_archives)):
        for batch in task.batches(Shard(archive, 0), BATCH, seed=(0, epoch, 0)):
            optimizer.zero_grad()
            loss_fn(model, batch.data).backward()
            optimizer.step()
    return -task.evaluate(model.eval()).valid.objf

if __name__ == "__main__":
    num_workers, num_epochs = map(int, sys.argv[1:] or (4, 4))
    run = ngsgd.train(make_task, num_workers=num_workers, num_epochs=num_epochs, batch_size=BATCH, lr=0.016)
    print(f"ngsgd, {num_workers} workers: valid/loss {run.metrics['valid/loss']:.3f}")
    print(f"AdamW, one process: valid/loss {adamw(make_task(), num_epochs):.3f}")
