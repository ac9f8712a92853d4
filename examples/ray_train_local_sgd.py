"""Local SGD in the training loop of Ray Train's TorchTrainer.

    python examples/ray_train_local_sgd.py [EPOCHS [WORKERS]]    (needs ray[train], scikit-learn)
"""
import sys
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy

import ngsgd


def loop(config):
    # a worker of Ray imports this in its own process
    sys.path.insert(0, config["folder"])
    from local_sgd import digits, make_model, minibatches

    dataset, (x, y) = digits()
    model = make_model()
    optimizer = ngsgd.NGSGD(model) if config["optimizer"] == "NGSGD" else torch.optim.AdamW(model.parameters(), 2e-3)
    # Ray Train has initialized torch.distributed
    local = ngsgd.LocalSGD(model, optimizer, sync_every=20, outer="average")
    for rows, labels in minibatches(dataset, config["epochs"]):
        optimizer.zero_grad()
        cross_entropy(model(rows), labels).backward()
        optimizer.step()
        local.step(num_samples=len(rows))
    local.finish()
    metrics = {"loss": cross_entropy(model(x), y).item(), "ranks": dist.get_world_size()}
    with tempfile.TemporaryDirectory() as folder:
        # all ranks have the same model now
        torch.save(model.state_dict(), f"{folder}/model.pt")
        checkpoint = ray.train.Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
        ray.train.report(metrics, checkpoint=checkpoint)

if __name__ == "__main__":
    epochs, workers = (int(sys.argv[i]) if sys.argv[i:] else default for i, default in ((1, 10), (2, 2)))
    with tempfile.TemporaryDirectory() as storage:
        for name in ("NGSGD", "AdamW"):
            config = {"folder": str(Path(__file__).resolve().parent), "optimizer": name, "epochs": epochs}
            trainer = TorchTrainer(loop, train_loop_config=config, scaling_config=ray.train.ScalingConfig(num_workers=workers),
                                   run_config=ray.train.RunConfig(storage_path=storage))
            found = trainer.fit().metrics
            print(f"{name} of {found['ranks']} ranks: valid loss {found['loss']:.3f}")
