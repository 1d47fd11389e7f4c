#!/usr/bin/env bash
# A nemorl run whose model is spread over all GPUs of several nodes of a Slurm cluster, by torchrun and without Ray.
#
#   sbatch --nodes=4 examples/cluster/torchrun.sh sft --config sft.yaml --run.dir runs/mine --parallel.tp 8
#
# Degrees that are left open take what the others leave: here tp 8 within each node, and FSDP2 over the four. The same line again goes on from the
# last checkpoint. The present folder, the run's and the environment must be on a file system that all nodes share.
#SBATCH --job-name=nemorl
#SBATCH --output=nemorl-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# Ten minutes before the time is up rank 0 is told to finish its step, save and end.
#SBATCH --signal=B:TERM@600
set -euo pipefail

source "${NEMORL_VENV:-.venv}/bin/activate"

# This script runs on the first node, where the processes of all nodes find each other.
head_ip=$(python -c 'import socket; print(socket.gethostbyname(socket.gethostname()))')
head_port=$((20000 + SLURM_JOB_ID % 10000))
# A node whose processes die is given two more tries, in each of which the run goes on from its last checkpoint.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --export=ALL --nodes="$SLURM_NNODES" \
    torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --max-restarts=2 --shutdown-timeout=540 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head_ip:$head_port" \
    -m nemorl "$@" --run.resume=auto &
run=$!
trap 'kill -TERM "$run"' TERM
set +e
while
    wait "$run"
    code=$?
    kill -0 "$run" 2> /dev/null
do :; done
exit "$code"
