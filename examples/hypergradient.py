"""The gradient of the validation loss w.r.t. the learning rate of every step, compared with a
finite difference.

    python examples/hypergradient.py
"""
import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ngsgd.hypergrad import HyperparameterPlan, ModuleTask, hypergradient

NUM_STEPS, LR, MOMENTUM = 50, 0.5, 0.9

torch.manual_seed(0)
x, y = torch.randn(600, 20, dtype=torch.float64), torch.randint(3, (600,))
x[torch.arange(600), y] += 2.0
model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3)).double()

def minibatch(step):
    first = 10 * step % 500
    return x[first:first + 10], y[first:first + 10]

def loss_of(output, batch, data_weights):
    return cross_entropy(output, batch[1])

def validation_loss_of_torch(lr):
    """torch.optim.SGD; the learning rate of ngsgd is multiplied by 1 - momentum."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr * (1 - MOMENTUM), MOMENTUM)
    for step in range(NUM_STEPS):
        inputs, labels = minibatch(step)
        optimizer.zero_grad()
        cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
    return cross_entropy(trained(x[500:]), y[500:]).item()

if __name__ == "__main__":
    task = ModuleTask(model, lambda place: minibatch(place.step), loss_of, [(x[500:], y[500:])])
    plan = HyperparameterPlan.constant(NUM_STEPS, num_layers=2, lr=LR, momentum=MOMENTUM)
    found = hypergradient(task, plan)
    print("by the learning rate of each layer in steps 0, 25 and 49:", found.lr_TG[[0, 25, 49]].tolist())
    print(f"by one learning rate for all steps: {found.lr_TG.sum():.6f}")
    difference = (validation_loss_of_torch(LR + 1e-5) - validation_loss_of_torch(LR - 1e-5)) / 2e-5
    print(f"finite difference of torch.optim.SGD: {difference:.6f}")
