"""Local SGD as a callback of Lightning: each process is a Trainer of one device, and ranks average.

    torchrun --nproc-per-node 2 examples/lightning_local_sgd.py [EPOCHS]    (needs lightning, scikit-learn)
"""
import sys

import lightning
import torch
import torch.distributed as dist
from local_sgd import digits, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import ngsgd


class LocalSGD(lightning.Callback):
    """Average the ranks every `sync_every` steps of the optimizer; checkpoints have its state."""

    def __init__(self, **options):
        self.options, self.local, self.state, self.num_steps = options, None, None, 0

    def on_train_start(self, trainer, module):
        [optimizer] = trainer.optimizers
        self.local = ngsgd.LocalSGD(module, getattr(optimizer, "optimizer", optimizer), **self.options)
        if self.state is not None:
            self.local.load_state_dict(self.state)
        self.num_steps, self.num_samples = trainer.global_step, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.num_samples += len(batch[0])
        # with accumulate_grad_batches, not every batch ends with a step
        if trainer.global_step > self.num_steps:
            self.local.step(num_samples=self.num_samples)
            self.num_steps, self.num_samples = trainer.global_step, 0

    def on_train_end(self, trainer, module):
        self.local.finish()

    def state_dict(self):
        return {} if self.local is None else self.local.state_dict()

    def load_state_dict(self, state):
        self.state = state

class Digits(lightning.LightningModule):
    def __init__(self, make_optimizer):
        super().__init__()
        self.model, self.make_optimizer = make_model(), make_optimizer

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make_optimizer(self)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    epochs = int(sys.argv[1]) if sys.argv[1:] else 10
    dataset, (x, y) = digits()
    for name, make_optimizer in (("NGSGD", ngsgd.NGSGD), ("AdamW", lambda module: torch.optim.AdamW(module.parameters(), 2e-3))):
        module = Digits(make_optimizer)
        loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
        trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, strategy="auto", logger=False,
                                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                    callbacks=[LocalSGD(sync_every=20, outer="average")])
        trainer.fit(module, loader)
        if dist.get_rank() == 0:
            print(f"{name} of {dist.get_world_size()} ranks: valid loss {cross_entropy(module.model(x), y).item():.3f}")
    dist.destroy_process_group()
