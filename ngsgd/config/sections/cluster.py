"""Options of the workers and of the exchange of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class ClusterConfig:
    """The workers, their devices and the exchange of parameters."""

    kind: Literal["in_process", "local", "ray", "slurm", "kubernetes"] = option(
        "local", "type of workers; local: processes of this machine; ray: Ray actors, the default "
        "with an address; in_process: one process; slurm, kubernetes: ngsgd submit only")
    num_workers: int = option(2, "number of workers", low=1, high=10000)
    ranks_per_worker: int = option(1, "number of processes of a worker, on one machine, that sum "
                                   "their gradients in every minibatch", low=1, high=64)
    threads_per_worker: int = option(0, "compute threads of a worker; 0: cores divided by workers, at least 1", low=0)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device of the workers; auto: a GPU if there is one, else the CPU")
    gpus_per_worker: float = option(
        0.0, "number of GPUs that each worker asks of Ray, and waits for; a fraction shares a GPU; 0: one for each rank, or on "
        "a Ray instance of this machine an equal share", low=0.0,
        used="kind=ray|slurm|kubernetes & device=auto|cuda")
    precision: Literal["float32", "tf32", "bf16"] = option(
        "float32", "precision of matrix products on the workers; tf32: GPUs only; bf16: autocast "
        "of forward pass and loss; parameters and Fisher factors stay float32")
    cuda_graphs: Literal["auto", "on", "off"] = option(
        "auto", "whether a GPU runs each training step as one CUDA graph; auto: for frame "
        "objectives; on: also for your own task, whose loss must not wait for the GPU")
    address: str = option("", "address of a Ray cluster, HOST:PORT or auto; the command line takes auto "
                          "if RAY_ADDRESS is set; empty: new Ray instance on this machine", used="kind=ray|slurm|kubernetes")
    wait_for_workers_s: float = option(
        600.0, "maximum time to wait for workers that are missing, at the start and after the loss "
        "of machines; counted from the last sign of life of a worker that starts", unit="s",
        above=0.0)
    exchange: Literal["auto", "shared_memory", "object_store", "collective", "nccl"] = option(
        "auto", "transport of parameters; auto: shared memory on one machine, else collective; "
        "collective: averaging by the workers with gloo; nccl: with NCCL, one GPU per worker (run "
        "on one GPU only); object_store: averaging by the coordinator")
    compression: Literal["none", "int8", "sparse"] = option(
        "none", "lossy format of the parameter deltas of jobs, of 1/4 (int8) or 1/103 (sparse) of "
        "the size; the error of a delta is added to the next one of the job slot")
    elastic: bool = option(False, "fewer jobs per outer iteration while workers are missing, "
                           "instead of a queue of jobs")
    price_per_hour: float = option(
        0.0, "price of one worker for an hour in any currency, for the cost in summary, report, "
        "MLflow and ngsgd plan; 0: not known", low=0.0)

    @property
    def codec(self) -> Literal["int8", "sparse"] | None:
        """The compression of parameter deltas; None without."""
        return None if self.compression == "none" else self.compression


def kind_with(address: str) -> str:
    """The default kind of a run with this address of a Ray cluster."""
    return "ray" if address else "local"
