"""Ray divides GPUs and MIG instances among workers, as far as that goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter

import pytest

pytestmark = pytest.mark.services

# a separate Ray: it reads the variable when it starts
_PROGRAM = """
import json, os, sys
import ray
from ngsgd.launcher.ray.capacity import gpu_share
from tests.tiers import HANGS_S
ray.init(address="local", num_gpus=2, num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])

class Worker:
    def visible(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

def placed(num_workers):
    share = gpu_share(ray.cluster_resources()["GPU"], num_workers)
    workers = [ray.remote(num_gpus=share, num_cpus=0)(Worker).remote() for _ in range(num_workers)]
    found = ray.get([worker.visible.remote() for worker in workers], timeout=HANGS_S)
    for worker in workers:
        ray.kill(worker)
    return found

print(json.dumps([placed(number) for number in (2, 4, 3)]))
"""


@pytest.mark.parametrize("names", [("0", "1"), ("MIG-a", "MIG-b")])
def test_each_worker_sees_one_gpu_or_instance_and_they_are_evenly_shared(names: tuple[str, str]) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names), "RAY_AUTH_TOKEN": "test-session"}
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        done = subprocess.run([sys.executable, "-c", _PROGRAM, folder], env=environment, capture_output=True,
                              text=True, check=False)
    assert done.returncode == 0, done.stderr
    two, four, three = (Counter(found) for found in json.loads(done.stdout.splitlines()[-1]))
    first, second = names
    assert two == {first: 1, second: 1}
    assert four == {first: 2, second: 2}
    assert three.keys() == {first, second} and max(three.values()) == 2
