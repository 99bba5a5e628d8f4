#!/bin/bash
# sbatch launch/slurm.sh --model llama3.1-8b --dp-replicate-size 2
# From the project's folder, on a file system that all nodes see; arguments go to train_fsdp.py.
# At the time limit, or when the cluster requeues it, the job goes on from its last checkpoint.
#SBATCH --job-name=train_fsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --output=%x-%j.out
set -euo pipefail

# the hub is asked once, here, and not by every rank: fill its cache before, or leave this out with a network
# export HF_HUB_OFFLINE=1

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8

# 120 s before the time limit: all ranks save and leave
requeue=
trap 'requeue=yes; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1

# one torchrun a node; it starts one rank a GPU
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds to save; torchrun of torch 2.11 kills after 30 whatever it says
srun .venv/bin/torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$head_node:29500" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train_fsdp.py --run-name "slurm-$SLURM_JOB_ID" --resume auto --checkpoint-interval 500 "$@" &
code=0
wait $! || code=$? # the trap ends this wait, so there is a second
if [ "$requeue" ]; then
    wait $! || true
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
