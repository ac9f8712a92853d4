"""The manifest of a run on Kubernetes: a RayJob with token authentication, for KubeRay 1.5.1."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ngsgd import __version__
from ngsgd.errors import ConfigError
from ngsgd.launcher.console import version
from ngsgd.object_storage.urls import is_url

# a DNS label, short enough for the suffixes of KubeRay
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?")
# the coordinator averages; workers train
_HEAD = {"cpu": "1", "memory": "4Gi"}
# time to finish the current outer iteration when a pod is evicted
_GRACE_S = 60
_MOUNT = "/shared"


@dataclass(frozen=True)
class KubernetesJob:
    """Resources and name of a Ray job on Kubernetes."""

    name: str
    namespace: str
    image: str
    # PersistentVolumeClaim that all pods share, mounted at `mount`; optional with object storage
    claim: str
    mount: str
    # worker pods
    num_nodes: int
    cpus_per_node: int
    gpus_per_node: int
    # memory of a worker pod in the notation of Kubernetes
    memory: str
    # after a failure of the run or its cluster
    num_retries: int

    @classmethod
    def of(cls, options: argparse.Namespace, name: str, where: str) -> KubernetesJob:
        """Return the job of a command line; raise one ConfigError with all mistakes.

        Args:
            options: of `ngsgd submit`.
            name: of the job.
            where: the run, or the folder of runs; object storage needs no claim.
        """
        least = {"nodes": 1, "cpus_per_node": 1, "gpus_per_node": 0, "retries": 0}
        problems = [f"--{what.replace('_', '-')} is {getattr(options, what)}; it must be at least "
                    f"{low}."
                    for what, low in least.items() if getattr(options, what) < low]
        if not _NAME.fullmatch(name):
            problems.append(f"--job-name is {name!r}; Kubernetes accepts up to 47 lower-case "
                            "letters, digits and '-'.")
        if not options.claim and not is_url(where):
            problems.append("--claim is missing; name a PersistentVolumeClaim that all pods can "
                            "write (ReadWriteMany), or set output_dir=s3://BUCKET/runs.")
        elif not options.claim and options.mount != _MOUNT:
            problems.append("--mount is the path of --claim, which is missing; remove --mount.")
        elif not is_url(where) and not PurePosixPath(where).is_relative_to(options.mount):
            problems.append(f"{where} is not on the volume of --claim, which the pods mount at {options.mount}; give a folder "
                            "there, or another --mount.")
        if problems:
            raise ConfigError(problems)
        # the tags of docker/Dockerfile; torch for CPUs finds no GPU
        image = options.image or f"ngsgd:{__version__}{'-cuda' if options.gpus_per_node else ''}"
        return cls(name, options.namespace, image, options.claim, options.mount, options.nodes, options.cpus_per_node,
                   options.gpus_per_node, options.memory, options.retries)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Kubernetes alone."""
    group = parser.add_argument_group("Kubernetes")
    group.add_argument("--image", default="",
                       help=f"container image (default: ngsgd:{__version__}, with GPUs ngsgd:{__version__}-cuda; see docker/)")
    group.add_argument("--namespace", default="default", help="namespace (default: %(default)s)")
    group.add_argument("--claim", default="", metavar="NAME",
                       help="PersistentVolumeClaim (ReadWriteMany) of output_dir, unless that is a URL")
    group.add_argument("--mount", default=_MOUNT, metavar="PATH",
                       help="path of the claim in the pods (default: %(default)s)")
    group.add_argument("--retries", type=int, default=3, metavar="N",
                       help="number of new clusters for a failed run, which resumes from its "
                            "checkpoint (default: %(default)s)")
    group.add_argument("--memory", default="8Gi",
                       help="memory of a worker pod (default: %(default)s)")


def manifest(request: KubernetesJob, words: Sequence[str]) -> str:
    """Return YAML for kubectl; `words` are the train or resume command, without cluster address."""
    import yaml

    return str(yaml.safe_dump(ray_job(request, words), sort_keys=False, width=120))


def ray_job(request: KubernetesJob, words: Sequence[str]) -> dict[str, Any]:
    """Return the RayJob as nested mappings."""
    return {
        "apiVersion": "ray.io/v1", "kind": "RayJob",
        "metadata": {"name": request.name, "namespace": request.namespace, "labels": {"app.kubernetes.io/name": "ngsgd"}},
        "spec": {
            "entrypoint": shlex.join(_entrypoint(request, words)),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            # every retry has a new cluster
            "backoffLimit": request.num_retries,
            "runtimeEnvYAML": "env_vars:\n  RAY_JOB_STOP_WAIT_TIME_S: \"60\"\n",
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _pod(request, "ray-head", _HEAD)},
                "workerGroupSpecs": [{
                    "groupName": "workers", "replicas": request.num_nodes, "minReplicas": request.num_nodes,
                    "maxReplicas": request.num_nodes, "rayStartParams": {},
                    "template": _pod(request, "ray-worker", _worker_resources(request))}]}}}


def _entrypoint(request: KubernetesJob, words: Sequence[str]) -> list[str]:
    """The command with a unique run name: the first try starts the run, retries resume it."""
    if "train" not in words[:2]:
        return list(words)
    given = next((word.partition("=")[2] for word in words if word.startswith("name=")), request.name)
    others = [word for word in words if not word.startswith("name=")]
    return [*others, "--continue", f"name={given}-{time.strftime('%Y%m%d%H%M%S')}", "cluster.address=auto"]


def _worker_resources(request: KubernetesJob) -> dict[str, str]:
    gpus = {"nvidia.com/gpu": str(request.gpus_per_node)} if request.gpus_per_node else {}
    return {"cpu": str(request.cpus_per_node), "memory": request.memory, **gpus}


def _pod(request: KubernetesJob, name: str, resources: dict[str, str]) -> dict[str, Any]:
    # the default /dev/shm of 64 MB is too small for Ray's object store
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if request.claim:
        mounts.append({"name": "shared", "mountPath": request.mount})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": request.claim}})
    return {"spec": {
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [{
            "name": name, "image": request.image,
            "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}, {"name": "OMP_WAIT_POLICY", "value": "PASSIVE"}],
            "resources": {"requests": dict(resources), "limits": dict(resources)},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": mounts}],
        "volumes": volumes}}
