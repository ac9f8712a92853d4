#!/usr/bin/env bash
# The steps of the image's build, one by one, on any machine with Python 3.11.
#   docker/build-steps.sh install VENV [TORCH_INDEX]    from the root of the source tree; "" takes pip's own index
#   docker/build-steps.sh check VENV
set -euo pipefail

install_into() {
    local venv=$1 index=${2:-}
    local python=${PYTHON:-python3.11}
    command -v "$python" >/dev/null || python=python3
    "$python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip install --no-cache-dir --quiet --disable-pip-version-check -c constraints.txt)
    "${pip[@]}" setuptools wheel
    # torch alone: its index has other versions of the packages that it requires; they come from PyPI below
    local from=()
    [ -z "$index" ] || from=(--index-url "$index")
    "${pip[@]}" "${from[@]}" --no-deps torch
    "${pip[@]}" ".[service,asr,synth,onnx,tune,sweep,store,trackers,postgres]"
}

check() {
    local bin=$1/bin
    "$bin/ngsgd" --version
    "$bin/ngsgd" train --cfg job >/dev/null
    cd /   # not in the source tree, which would hide a package that is missing from the wheel
    "$bin/python" -c "import ngsgd, ngsgd.launcher.cli, ngsgd.conf, torch, ray, mlflow, obstore, onnx, optuna, tensorboard, wandb; print('imports are whole')"
}

case ${1:-} in
    install) install_into "$2" "${3:-}" ;;
    check) check "$2" ;;
    *) echo "usage: $0 install VENV [TORCH_INDEX] | check VENV" >&2; exit 2 ;;
esac
