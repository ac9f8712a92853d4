"""A Ray cluster: joining or starting it, dividing its GPUs, and what its errors mean."""

from __future__ import annotations

import logging
import math
import os
import secrets
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError, NgsgdError

_STORE_BYTES = 512 * 2**20  # plasma on one machine; parameters and results of some tens of workers


def connect(config: ClusterConfig) -> bool:
    """Joins the Ray cluster of `config.address`, or starts one on this machine; True if it was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():  # a test session, or a user's own program
        return False
    worker_env = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))}
    worker_env["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads of one worker would starve another
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR,
                              "runtime_env": {"env_vars": worker_env}}
    try:
        if config.address:
            ray.init(address=config.address, **common)
            return False
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray listens on all interfaces: never without a token
        ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **common)
        return True
    except (RayError, OSError, ValueError, RuntimeError, ConnectionError) as error:
        where = f"the Ray cluster at {config.address} could not be joined" if config.address else "Ray could not be started"
        raise ClusterError(f"{where} ({_first_line(error)}); check cluster.address, or use cluster=in_process.") from error


def gpu_share(num_gpus: float, num_workers: int) -> float:
    """GPUs of a worker: one of its own where there are enough, else the part with which all workers find room, evenly spread."""
    workers_per_gpu = math.ceil(num_workers / num_gpus) if num_gpus else 0
    # Ray counts in ten-thousandths: six workers of 0.1667 would not fit
    return math.floor(1e4 / workers_per_gpu) / 1e4 if workers_per_gpu else 0.0


def cause_of(error: RayTaskError) -> Exception:
    """What a worker's constructor raised: the user's error if it is one of ours."""
    cause = error.cause
    if isinstance(cause, NgsgdError):
        return cause
    return ClusterError(f"a worker could not start ({type(cause).__name__}: {cause}); "
                        "is the same version of ngsgd installed on every node?")


def how_it_ended(error: RayError) -> str:
    text = str(error)
    if "SIGKILL" in text or "signal 9" in text:
        return "killed by SIGKILL"
    if isinstance(error, RayActorError):
        return "its process ended"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
