#!/usr/bin/env bash
# Healthy: what this container is for answers.
set -euo pipefail
role=$(cat /tmp/role 2>/dev/null || true)
get() { python -c "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)" "$1"; }
case $role in
    head) ray health-check --address localhost:6379 ;;
    worker) ray health-check --address "${HEAD:-head}:6379" ;;
    mlflow) get http://127.0.0.1:5000/health ;;
    *) exit 0 ;;
esac
