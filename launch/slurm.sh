#!/bin/bash
# sbatch launch/slurm.sh --model llama3.1-8b --dp-replicate-size 2
# From the project's folder, on a file system that all nodes see; arguments go to train_fsdp.py.
#SBATCH --job-name=train_fsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
set -euo pipefail

# the hub is asked once, here, and not by every rank: fill its cache before, or leave this out with a network
# export HF_HUB_OFFLINE=1

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8

# one torchrun a node; it starts one rank a GPU
srun .venv/bin/torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$head_node:29500" \
    train_fsdp.py --run-name "slurm-$SLURM_JOB_ID" "$@"
