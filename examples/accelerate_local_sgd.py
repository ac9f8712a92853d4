"""Local SGD in a loop of Accelerate, which divides the data; the model is not given to `prepare`.

    torchrun --nproc-per-node 2 examples/accelerate_local_sgd.py [EPOCHS]    (needs accelerate, scikit-learn)
"""
import sys

import torch
from accelerate import Accelerator
from local_sgd import digits, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import ngsgd


def train(accelerator, dataset, make_optimizer, epochs):
    # prepare would wrap the model in DistributedDataParallel, which sums gradients in each step
    model = make_model().to(accelerator.device)
    optimizer = make_optimizer(model)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=32, shuffle=True))
    local = ngsgd.LocalSGD(model, optimizer, sync_every=20, outer="average")
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            local.step(num_samples=len(x))
    local.finish()
    return model

if __name__ == "__main__":
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    epochs = int(sys.argv[1]) if sys.argv[1:] else 10
    dataset, (x, y) = digits()
    for name, make_optimizer in (("NGSGD", ngsgd.NGSGD), ("AdamW", lambda model: torch.optim.AdamW(model.parameters(), 2e-3))):
        model = train(accelerator, dataset, make_optimizer, epochs)
        loss = cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device))
        accelerator.print(f"{name} of {accelerator.num_processes} ranks: valid loss {loss.item():.3f}")
    accelerator.end_training()
