#!/bin/bash
#SBATCH --job-name=@name@
#SBATCH --nodes=@num_nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@cpus_per_node@
#SBATCH --time=@time_limit@
#SBATCH --output=ngsgd-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@@warn_s@
@more@set -eo pipefail
@setup@set -u

# a token for this job, because Ray listens on all interfaces
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0 OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# since Slurm 22.05 the steps do not inherit --cpus-per-task, and could be bound to one core
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# uncomment and adapt to your network
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_DISABLE=0 NCCL_DEBUG=WARN

# Slurm warns before it removes the nodes: finish the outer iteration, save, and requeue
warned=0 run=""
trap 'warned=1; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null || true' TERM USR1

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")   # a pipe into `head` ends it by SIGPIPE
head=${hosts[0]}
# Debian maps the host name to a loopback address, which other machines cannot reach
ip=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" bash -c 'hostname --ip-address; hostname --all-ip-addresses' |
    awk '{for (i = 1; i <= NF; i++) if (!ip && $i !~ /^127[.]|:/) ip = $i} END {print ip ? ip : "127.0.0.1"}')
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_ADDRESS="$ip:$port"
scratch=/tmp/ngsgd-$SLURM_JOB_ID   # short, because socket paths have a maximum length
node=(--block --num-cpus="$SLURM_CPUS_PER_TASK" --temp-dir="$scratch" --disable-usage-stats)

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$ip" --port="$port" --include-dashboard=false "${node[@]}" &
steps=$!
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # other nodes cannot join before the head is up
    until ray status --address "$RAY_ADDRESS" >/dev/null 2>&1; do kill -0 "$steps"; sleep 1; done
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --overlap --nodes=$others --ntasks=$others --exclude="$head" ray start --address="$RAY_ADDRESS" "${node[@]:0:2}" \
        --disable-usage-stats &
fi
for ((tries = 0; tries < @start_s@; tries++)); do
    kill -0 "$steps"   # Ray has ended, and so does the job; the log holds the reason
    up=$(ray status --address "$RAY_ADDRESS" 2>/dev/null | grep -c ' node_' || true)
    [ "$up" -ge "$SLURM_JOB_NUM_NODES" ] && break
    sleep 1
done

@start@
[ "$warned" = 0 ] || kill -TERM "$run" 2>/dev/null || true   # warned during the start of Ray
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do code=0; wait "$run" || code=$?; done
about=$(scontrol show job "$SLURM_JOB_ID" || true)
again=0
case $warned-$code in 1-130 | 1-143) again=1 ;; esac
# a preemption that signals only the steps ends Ray before the run
[ "$code" = 0 ] || [[ $about != *PreemptTime=2* ]] || again=1
# SIGTERM of scancel looks like a warning, but the job is no longer running and must not be requeued
if [ "$again" = 1 ] && [[ $about == *JobState=RUNNING* ]]; then
    scontrol requeue "$SLURM_JOB_ID"   # before the end of Ray, which may take longer than Slurm waits
    code=0
fi
kill "$steps" 2>/dev/null || true
exit "$code"
