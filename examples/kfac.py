"""K-FAC and other preconditioners selected by name in `ngsgd.train`, and PyTorch's AdamW in one
process.

    python examples/kfac.py [EPOCHS OPTIMIZER...]      (needs scikit-learn, for the images)
"""
import itertools
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ngsgd
from ngsgd.schedules import Shard
from ngsgd.tasks import DatasetTask

BATCH = 32

def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

def loss_fn(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)

def make_task():
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    return DatasetTask(dataset, make_model, loss_fn, valid=0.2)

def adamw(task, epochs):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for epoch, archive in itertools.product(range(epochs), range(task.shards().num_archives)):
        for batch in task.batches(Shard(archive, 0), BATCH, seed=(0, epoch, 0)):
            optimizer.zero_grad()
            loss_fn(model, batch.data).backward()
            optimizer.step()
    return -task.evaluate(model.eval()).valid.objf

if __name__ == "__main__":
    num_epochs, optimizers = int(sys.argv[1]) if sys.argv[1:] else 5, sys.argv[2:] or ["kfac"]
    for name in optimizers:
        run = ngsgd.train(make_task, cluster="in_process", num_epochs=num_epochs, batch_size=BATCH, lr=0.016, optimizer=name)
        print(f"{name}: valid/loss {run.metrics['valid/loss']:.3f}")
    print(f"AdamW, one process: valid/loss {adamw(make_task(), num_epochs):.3f}")
