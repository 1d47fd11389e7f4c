#!/usr/bin/env bash
# A nemorl run on several nodes of a Slurm cluster: Ray starts on all of them, and nemorl runs on the first.
#
#   sbatch --nodes=3 examples/cluster/slurm.sh grpo --config grpo.yaml --run.dir runs/mine --generation.backend vllm --generation.num-replicas 2
#
# The same line again goes on from the last checkpoint. The present folder, the run's and the environment must be on a file system that all nodes share.
#SBATCH --job-name=nemorl
#SBATCH --output=nemorl-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# Ten minutes before the time is up nemorl is told to finish its step, save and end.
#SBATCH --signal=B:TERM@600
set -euo pipefail

source "${NEMORL_VENV:-.venv}/bin/activate"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# This script runs on the first node. Ray takes the network of the default route: where nodes have several, write the address in the fast one here.
head_ip=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
head_port=$((20000 + SLURM_JOB_ID % 10000))
# Whoever can reach the cluster's ports could run code on it, but for a secret that is this job's own and reaches its processes by their environment.
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE RAY_AUTH_TOKEN
ray_options=(--block --disable-usage-stats --temp-dir="/tmp/ray-$SLURM_JOB_ID" --min-worker-port=0 --max-worker-port=0)
step_options=(--ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --overlap --export=ALL)

trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
srun "${step_options[@]}" --nodes=1 --nodelist="${nodes[0]}" \
    ray start --head --node-ip-address="$head_ip" --port="$head_port" --ray-client-server-port=$((head_port + 10000)) \
    --include-dashboard=false "${ray_options[@]}" &
until (: < "/dev/tcp/$head_ip/$head_port") 2> /dev/null; do
    kill -0 $! || exit 1 # the head did not start: its output says why
    sleep 1
done
if ((${#nodes[@]} > 1)); then
    others=$(IFS=, && echo "${nodes[*]:1}")
    srun "${step_options[@]}" --nodes=$((${#nodes[@]} - 1)) --nodelist="$others" ray start --address="$head_ip:$head_port" "${ray_options[@]}" &
fi

export RAY_ADDRESS="$head_ip:$head_port"
timeout 300 python - "${#nodes[@]}" << 'PYTHON'
import sys, time, ray

ray.init(logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
PYTHON

nemorl "$@" --run.resume=auto &
run=$!
trap 'kill -TERM "$run"' TERM
set +e
while
    wait "$run"
    code=$?
    kill -0 "$run" 2> /dev/null
do :; done
exit "$code"
