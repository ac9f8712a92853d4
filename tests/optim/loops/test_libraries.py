"""Loops of other libraries: Lightning, Accelerate, Hugging Face's Trainer, LoRA adapters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tests.torchvision_operators  # noqa: F401  before Lightning imports torchvision
from ngsgd import NGSGD
from tests.optim.loops.task import SIZE, assert_equal, mean_loss, minibatches, network, rows, train

pytestmark = pytest.mark.slow  # the libraries take seconds to import


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows()), batch_size=SIZE)


@pytest.mark.entry("L1", "you train with Lightning", "works",
                   "`configure_optimizers` may return an NGSGD; a run is bitwise identical to the plain loop, also one that "
                   "BaseFinetuning unfreezes")
def test_lightning_is_the_plain_loop(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return mean_loss(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return NGSGD(self.model, lr=0.5, weight_decay=1e-3)

    class Unfreeze(lightning.pytorch.callbacks.BaseFinetuning):  # type: ignore[misc,name-defined]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.model[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.model[0], optimizer, lr=0.1)

    for callbacks in ([], [Unfreeze()]):
        module = Module()
        with warnings.catch_warnings():
            # Lightning's, about loaders, and ours, about weight decay of a mean
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                                        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
                                        default_root_dir=tmp_path)
            trainer.fit(module, loader())
            model = network()
            model[0].requires_grad_(not callbacks)
            optimizer = NGSGD(model, lr=0.5, weight_decay=1e-3)
            train(model, optimizer, minibatches())
            if callbacks:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
            train(model, optimizer, minibatches())
        assert_equal(module.model, model)


@pytest.mark.entry("L2", "you train with Accelerate", "works",
                   "`accelerator.prepare(model, optimizer, loader)` and `save_state` / `load_state` equal the plain "
                   "loop bitwise")
def test_accelerate_is_the_plain_loop(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    straight = network()
    straight_optimizer = NGSGD(straight, lr=0.5)
    train(straight, straight_optimizer, minibatches() + minibatches()[:3])

    accelerator = accelerate.Accelerator(cpu=True)
    for start in (0, 1):
        model = network(seed=start)
        model, optimizer, data = accelerator.prepare(model, NGSGD(model, lr=0.5), loader())
        if start:
            accelerator.load_state(str(tmp_path))
        for index, (x, y) in enumerate(data):
            if start and index == 3:
                break
            optimizer.zero_grad()
            accelerator.backward(mean_loss(model, x, y))
            optimizer.step()
        if not start:
            accelerator.save_state(str(tmp_path))
            accelerator.free_memory()
    assert_equal(model, straight)


@pytest.mark.entry("L3", "you train with the Trainer of Hugging Face", "works",
                   "give it as `optimizers=(NGSGD(model, lr, loss_reduction=\"mean\"), scheduler)`; a run that is resumed from a "
                   "checkpoint is bitwise identical to an uninterrupted one")
def test_the_hugging_face_trainer_resumes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net = network(seed)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": mean_loss(self.net, x, labels)}

    x, y = rows()
    data = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]

    def trainer(seed: int) -> Any:
        model = Model(seed)
        optimizer = NGSGD(model, lr=0.5)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=SIZE, save_steps=4, report_to=[], use_cpu=True,
            disable_tqdm=True, max_grad_norm=0.0, logging_steps=100)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, scheduler))

    straight = trainer(0)
    straight.train()
    resumed = trainer(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_equal(resumed.model.net, straight.model.net)
    assert {estimate.num_calls for _, estimate in resumed.optimizer.optimizer.preconditioners()} == {8}


@pytest.mark.entry("L7", "you train LoRA adapters (peft)", "works",
                   "the adapters are Linear layers and are preconditioned; the frozen layers stay, and feed no estimates")
def test_lora_adapters_train_and_the_rest_stays() -> None:
    peft = pytest.importorskip("peft")
    base = network()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "3"], r=2, lora_alpha=8))
    optimizer = NGSGD(model, lr=0.03)
    assert len(optimizer.preconditioned) == 4 and all("lora_" in name for name in optimizer.preconditioned)
    assert optimizer.fallbacks == []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, optimizer, minibatches() * 4)
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name)
