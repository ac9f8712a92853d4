"""A convolutional network with BatchNorm on 8 x 8 images of digits, with 2 workers, and with
PyTorch's AdamW in one process.

    python examples/image_classification.py [WORKERS EPOCHS]      (needs scikit-learn, for the images)
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
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

def loss_fn(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)

def accuracy(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(dim=1) == labels).float().mean()}

def make_task():
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    return DatasetTask(TensorDataset(images, torch.from_numpy(labels)), make_model, loss_fn, metrics_fn=accuracy, valid=0.2)

def adamw(task, epochs):
    """The validation loss of an ordinary loop over the same examples."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for epoch, archive in itertools.product(range(epochs), range(task.shards().num_archives)):
        for batch in task.batches(Shard(archive, 0), BATCH, seed=(0, epoch, 0)):
            optimizer.zero_grad()
            loss_fn(model, batch.data).backward()
            optimizer.step()
    return -task.evaluate(model.eval()).valid.objf

if __name__ == "__main__":
    num_workers, num_epochs = map(int, sys.argv[1:] or (2, 10))
    run = ngsgd.train(make_task, num_workers=num_workers, num_epochs=num_epochs, batch_size=BATCH, lr=0.016)
    print(f"accuracy {run.metrics['valid/accuracy']:.3f}")
    print(f"ngsgd, {num_workers} workers: valid/loss {run.metrics['valid/loss']:.3f}")
    print(f"AdamW, one process: valid/loss {adamw(make_task(), num_epochs):.3f}")
