"""Local SGD in a custom loop, started by torchrun, and DistributedDataParallel, which sums
gradients in each step.

    torchrun --nproc-per-node 2 examples/local_sgd.py [EPOCHS]      (needs scikit-learn, for the images)
"""
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ngsgd


def digits():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    return TensorDataset(images[:1440], labels[:1440]), (images[1440:], labels[1440:])

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

def minibatches(dataset, num_epochs):
    sampler = DistributedSampler(dataset)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=32, sampler=sampler)

def local_sgd(dataset, num_epochs):
    model = make_model()
    optimizer = ngsgd.NGSGD(model)
    local = ngsgd.LocalSGD(model, optimizer, sync_every=20, outer="average")
    for x, y in minibatches(dataset, num_epochs):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        local.step(num_samples=len(x))
    local.finish()
    return model

def data_parallel(dataset, num_epochs):
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for x, y in minibatches(dataset, num_epochs):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.module

if __name__ == "__main__":
    dist.init_process_group("gloo")
    epochs = int(sys.argv[1]) if sys.argv[1:] else 10
    train, (x, y) = digits()
    for name, trained in (("LocalSGD with NGSGD, an average every 20 steps", local_sgd), ("DDP with AdamW", data_parallel)):
        loss = cross_entropy(trained(train, epochs)(x), y)
        if dist.get_rank() == 0:
            print(f"{name}: valid loss {loss.item():.3f}")
    dist.destroy_process_group()
