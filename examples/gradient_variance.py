"""The variance of the gradient over the samples of a minibatch, from the backward pass and from
torch.func.

    python examples/gradient_variance.py
"""
import time

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from ngsgd.curvature import collect

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 10))
loss_fn = nn.CrossEntropyLoss()
x, y = torch.randn(256, 100), torch.randint(10, (256,))

def ours():
    model.zero_grad()
    with collect(model, "variance", loss_fn=loss_fn) as quantities:
        loss_fn(model(x), y).backward()
    return {name: quantities[name].variance for name, _ in model.named_parameters()}

def by_torch():
    """Gradients of all samples, 256 times the memory of the parameters."""
    def loss_of_one(parameters, x, y):
        return loss_fn(functional_call(model, parameters, (x[None],)), y[None])
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(parameters, x, y)
    return {name: gradient.var(dim=0, unbiased=False) for name, gradient in gradients.items()}

def timed(function):
    function()
    start = time.perf_counter()
    result = function()
    return result, 1e3 * (time.perf_counter() - start)

if __name__ == "__main__":
    (variance, ms), (expected, torch_ms) = timed(ours), timed(by_torch)
    for name, value in variance.items():
        print(f"{name}: mean variance {value.mean():.3e}, torch.func {expected[name].mean():.3e}")
    print(f"collect: {ms:.1f} ms")
    print(f"torch.func: {torch_ms:.1f} ms")
