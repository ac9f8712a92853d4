#!/usr/bin/env bash
# head | worker | mlflow | any command
set -euo pipefail

need_token() {
    local token=${RAY_AUTH_TOKEN:-}
    if [ "${#token}" -lt 32 ]; then
        echo "RAY_AUTH_TOKEN has fewer than 32 characters; make one with: openssl rand -hex 32" >&2
        exit 2
    fi
}

case ${1:-} in
    head)
        need_token
        echo head > /tmp/role
        exec ray start --head --block --port=6379 --dashboard-host=0.0.0.0 --num-cpus=0 --disable-usage-stats ;;
    worker)
        need_token
        echo worker > /tmp/role
        exec ray start --block --address="${HEAD:-head}:6379" --disable-usage-stats ;;
    mlflow)
        echo mlflow > /tmp/role
        mkdir -p /shared/mlflow
        exec mlflow server --host 0.0.0.0 --port 5000 --workers 1 \
            --allowed-hosts "${MLFLOW_HOSTS:-mlflow:5000,localhost:5000,127.0.0.1:5000}" \
            --backend-store-uri "${MLFLOW_STORE:-sqlite:////shared/mlflow/mlflow.db}" --artifacts-destination /shared/mlflow/artifacts ;;
    *)
        exec "$@" ;;
esac
