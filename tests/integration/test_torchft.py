"""Our outer optimizers go where torchft's LocalSGD and (Streaming) DiLoCo go: the same model, data
and inner steps.

torchft's classes run as they are, each replica in a separate thread; their manager, which would
need a server and process groups, is a barrier over these threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo as TorchftDiLoCo
from torchft.local_sgd import LocalSGD
from torchft.work import _DummyWork

from ngsgd.optim.outer import Average, BlockMomentum, DiLoCo, OuterInfo, OuterOptimizer, OuterRule
from tests.tiers import HANGS_S

REPLICAS, SYNC_EVERY, ROUNDS = 3, 4, 6
# float64, 6 outer iterations; torch sums and divides where we multiply by shares
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x_ND = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    (model(x_ND) - x_ND[:, :3] ** 2).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> Any:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def load(model: nn.Module, vector: Any) -> None:
    torch.nn.utils.vector_to_parameters(torch.tensor(vector), model.parameters())


class Swarm:
    """Averages across the threads of the replicas."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(REPLICAS, timeout=HANGS_S)
        self.tensors: list[Tensor] = [torch.empty(0)] * REPLICAS

    def mean(self, replica: int, tensor: Tensor) -> Tensor:
        self.tensors[replica] = tensor.clone()
        self.barrier.wait()
        mean = torch.stack(self.tensors).mean(0)
        self.barrier.wait()  # nobody writes before everybody has read
        return mean


class Manager:
    """What LocalSGD and DiLoCo ask of torchft's manager, in a swarm where nothing fails."""

    _use_async_quorum = False

    def __init__(self, swarm: Swarm, replica: int) -> None:
        self.swarm, self.replica, self.step = swarm, replica, 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        return _DummyWork(tensor.copy_(self.swarm.mean(self.replica, tensor)))

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def current_step(self) -> int:
        return self.step

    def nothing(self, *_: Any) -> None:
        pass

    start_quorum = disallow_state_dict_read = allow_state_dict_read = register_state_dict_fn = nothing


def torchft_path(wrap: Callable[[Any, nn.Sequential, torch.optim.Optimizer], Any], num_syncs: int, sync_every: int) -> Any:
    """Each replica's parameters after each synchronization: syncs x replicas x parameters."""
    swarm = Swarm()

    def replica_path(replica: int) -> list[Any]:
        model = models[replica]
        optimizer, path = inner_optimizer(model), []
        with wrap(Manager(swarm, replica), model, optimizer):
            for step in range(num_syncs * sync_every):
                inner_step(model, optimizer, replica, step)
                if (step + 1) % sync_every == 0:
                    path.append(flat(model))
        return path
    # here, because threads share torch's random numbers
    models = [new_model() for _ in range(REPLICAS)]
    with ThreadPoolExecutor(REPLICAS) as threads:
        return np.array(list(threads.map(replica_path, range(REPLICAS)))).swapaxes(0, 1)


def our_path(rule: OuterRule) -> Any:
    """The broadcast model after each outer iteration."""
    outer, path = OuterOptimizer(rule, flat(new_model())), []
    for t in range(ROUNDS):
        results = []
        for job in range(REPLICAS):
            model = new_model()
            load(model, outer.broadcast())
            for step in range(t * SYNC_EVERY, (t + 1) * SYNC_EVERY):
                inner_step(model, inner_optimizer(model), job, step)
            results.append(flat(model))
        outer.step(results, [1.0] * REPLICAS, OuterInfo(t, ROUNDS, REPLICAS, 0.05))
        path.append(outer.broadcast())
    return path


def outer_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def assert_every_replica_follows(theirs: Any, ours: Any) -> None:
    for replica in range(REPLICAS):
        np.testing.assert_allclose(ours, theirs[:, replica], **CLOSE)


def test_averaging_goes_where_torchfts_local_sgd_goes() -> None:
    theirs = torchft_path(lambda manager, model, inner: LocalSGD(manager, model, inner, SYNC_EVERY), ROUNDS, SYNC_EVERY)
    assert_every_replica_follows(theirs, our_path(Average()))


@pytest.mark.parametrize("rule", [DiLoCo(0.7, 0.9), BlockMomentum(0.9, 0.7)], ids=["diloco", "nbm"])
def test_diloco_and_nesterov_block_momentum_go_where_torchfts_diloco_goes(rule: OuterRule) -> None:
    theirs = torchft_path(lambda manager, model, inner: TorchftDiLoCo(manager, [model], inner, outer_sgd(model), SYNC_EVERY),
                          ROUNDS, SYNC_EVERY)
    assert_every_replica_follows(theirs, our_path(rule))


def our_streaming_path(fragments: list[slice], delay: int, mixing: float) -> Any:
    """Every job's own parameters after each synchronization of one fragment."""
    outer = OuterOptimizer(DiLoCo(0.7, 0.9), flat(new_model()))
    models, path = [new_model() for _ in range(REPLICAS)], []
    for t in range(ROUNDS):
        part = fragments[t % len(fragments)]
        sent = []
        for job, model in enumerate(models):
            optimizer = inner_optimizer(model)
            for step in range(t * SYNC_EVERY, (t + 1) * SYNC_EVERY):
                inner_step(model, optimizer, job, step)
                if step + 1 == (t + 1) * SYNC_EVERY - delay:
                    sent.append(flat(model)[part])
        outer.step(sent, [1.0] * REPLICAS, OuterInfo(t, ROUNDS, REPLICAS, 0.05),
                   pieces=[(part, slice(0, part.stop - part.start))])
        for model in models:
            own = flat(model)
            own[part] = mixing * own[part] + (1.0 - mixing) * outer.broadcast()[part]
            load(model, own)
        path.append([flat(model) for model in models])
    return path


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (2, 0.0), (0, 0.5), (2, 0.5)])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_streaming_goes_where_torchfts_streaming_diloco_goes(num_fragments: int, delay: int, mixing: float) -> None:
    def wrap(manager: Any, model: nn.Sequential, inner: torch.optim.Optimizer) -> Any:
        fragments = [model] if num_fragments == 1 else list(model)
        # torchft's `sync_every` is for all fragments together
        return TorchftDiLoCo(manager, fragments, inner, [outer_sgd(fragment) for fragment in fragments],
                             SYNC_EVERY * num_fragments, fragment_sync_delay=delay, fragment_update_alpha=mixing)
    theirs = torchft_path(wrap, ROUNDS, SYNC_EVERY)
    edge = sum(p.numel() for p in new_model()[0].parameters())
    fragments = [slice(0, theirs.shape[-1])] if num_fragments == 1 else [slice(0, edge), slice(edge, theirs.shape[-1])]
    np.testing.assert_allclose(our_streaming_path(fragments, delay, mixing), theirs, **CLOSE)
