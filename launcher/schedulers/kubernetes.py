"""The manifest of a run on Kubernetes: a RayJob with token authentication, for KubeRay 1.5.1."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ngsgd import __version__
from ngsgd.errors import ConfigError
from ngsgd.launcher.arguments import Parser, out_of_range
from ngsgd.launcher.console import version
from ngsgd.launcher.ray.jobs import IN_JOB
from ngsgd.launcher.ray.probe import require_version
from ngsgd.launcher.schedulers.slurm import without_name
from ngsgd.object_storage.urls import is_url

# KubeRay's operator refuses others: a DNS label of RFC 1035, short enough for its suffixes
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
_HEAD = {"cpu": "1", "memory": "4Gi"}  # the coordinator averages; workers train
_GRACE_S = 60  # time to finish the current outer iteration when a pod is evicted
_MOUNT = "/shared"


def add_arguments(parser: Parser) -> None:
    """Add the flags of Kubernetes alone."""
    parser.declare({
        "--image IMAGE": ("", f"container image (default: ngsgd:{__version__}, with GPUs ngsgd:{__version__}-cuda; see docker/)"),
        "--namespace NAMESPACE": ("default", "namespace"),
        "--claim NAME": (str, "PersistentVolumeClaim (ReadWriteMany) of output_dir, unless that is a URL"),
        "--mount PATH": (_MOUNT, "path of the claim in the pods"),
        "--retries N": (3, "number of new clusters for a failed run, which resumes from its checkpoint"),
        "--memory MEMORY": ("8Gi", "memory of a worker pod")}, "Kubernetes")


def manifest(options: argparse.Namespace, name: str, where: str, words: Sequence[str],
             environment: Mapping[str, str]) -> str:
    """Return YAML for kubectl; raise one ConfigError with all mistakes.

    `words` are the train or resume command, without cluster address, and `environment` its
    variables. `where` is the run, or the folder of runs; object storage needs no claim.
    """
    import yaml
    # KubeRay compares rayVersion with the first one that has tokens
    require_version()
    problems = out_of_range(options, {"nodes": 1, "cpus_per_node": 1, "gpus_per_node": 0, "retries": 0})
    if not version("ray")[0].isdigit():
        problems.append("Ray is not installed here, and the manifest names its version; pip install 'ngsgd[service]'.")
    if not _NAME.fullmatch(name):
        problems.append(f"--job-name is {name!r}; KubeRay accepts up to 47 lower-case letters, digits "
                        "and '-', of which the first is a letter.")
    if not options.claim and not is_url(where):
        problems.append("--claim is missing; name a PersistentVolumeClaim that all pods can "
                        "write (ReadWriteMany), or set output_dir=s3://BUCKET/runs.")
    elif not options.claim and options.mount != _MOUNT:
        problems.append("--mount is the path of --claim, which is missing; remove --mount.")
    elif not is_url(where) and not PurePosixPath(where).is_relative_to(options.mount):
        problems.append(f"{where} is not on the volume of --claim, which the pods mount at "
                        f"{options.mount}; give a folder there, or another --mount.")
    if problems:
        raise ConfigError(problems)
    if "train" in words[:2]:
        # a unique name: the first try starts the run, retries resume it
        run, others = without_name(words, name)
        words = [*others, "--continue", f"name={run}-{time.strftime('%Y%m%d%H%M%S')}", *IN_JOB]
    gpus = {"nvidia.com/gpu": str(options.gpus_per_node)} if options.gpus_per_node else {}
    resources = {"cpu": str(options.cpus_per_node), "memory": options.memory, **gpus}
    job = {
        "apiVersion": "ray.io/v1", "kind": "RayJob",
        "metadata": {"name": name, "namespace": options.namespace, "labels": {"app.kubernetes.io/name": "ngsgd"}},
        "spec": {
            "entrypoint": shlex.join(words),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            # every retry has a new cluster
            "backoffLimit": options.retries,
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": dict(environment)}),
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _pod(options, "ray-head", _HEAD)},
                "workerGroupSpecs": [{
                    "groupName": "workers", "replicas": options.nodes, "minReplicas": options.nodes,
                    "maxReplicas": options.nodes, "rayStartParams": {},
                    "template": _pod(options, "ray-worker", resources)}]}}}
    return str(yaml.safe_dump(job, sort_keys=False, width=120))


def _pod(options: argparse.Namespace, name: str, resources: dict[str, str]) -> dict[str, Any]:
    # the tags of docker/Dockerfile; torch for CPUs finds no GPU
    image = options.image or f"ngsgd:{__version__}{'-cuda' if options.gpus_per_node else ''}"
    # the default /dev/shm of 64 MB is too small for Ray's object store
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if options.claim:
        mounts.append({"name": "shared", "mountPath": options.mount})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}})
    return {"spec": {
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [{
            "name": name, "image": image,
            "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}, {"name": "OMP_WAIT_POLICY", "value": "PASSIVE"}],
            "resources": {"requests": dict(resources), "limits": dict(resources)},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": mounts}],
        "volumes": volumes}}
