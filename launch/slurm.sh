#!/bin/bash
# sbatch launch/slurm.sh --model llama3.1-8b
# From the project's folder, on a file system that all nodes see; arguments go to train_fsdp.py. The run lies in
# outputs/slurm-JOBID, or where RUN_FOLDER in the environment of sbatch says, and goes on if it is there already.
# What happens at the time limit, when a rank or a node dies, and at scancel: docs/LAUNCH.md
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
run=${RUN_FOLDER:-outputs/slurm-$SLURM_JOB_ID}
newest() { find "$run/checkpoints" -maxdepth 1 -name 'step-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]' 2> /dev/null | sort | tail -n 1 || true; }
exit_code() {
    .venv/bin/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["starts"][-1].get("exit_code"))' \
        "$run/config.json"
}

# the hub is asked once, here, and not by every rank: fill its cache before, or leave this out with a network
# export HF_HUB_OFFLINE=1
# what a fabric may need, and what to look for in the log of NCCL_DEBUG=INFO (GDRDMA, NVLS): docs/LAUNCH.md
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_NET_GDR_LEVEL=PHB NCCL_NVLS_ENABLE=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds to save; torchrun of torch 2.11 kills after 30 whatever it says
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # --max-restarts on several nodes: no restart meets dead ranks' addresses

# 120 s before the time limit: all ranks save and leave
signalled=
trap 'signalled=yes; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1

# one torchrun a node, which starts one rank a GPU that its step has there; when one ends with an error, so do the others
before=$(newest)
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export run head_node
# shellcheck disable=SC2016 # the variables are for the shell of each node: SLURM_GPUS_ON_NODE is not the same on all
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
    exec .venv/bin/torchrun \
        --nnodes="$SLURM_NNODES" \
        --nproc_per_node="${SLURM_GPUS_ON_NODE:-gpu}" \
        --max-restarts=3 \
        --rdzv_id="$SLURM_JOB_ID" \
        --rdzv_backend=c10d \
        --rdzv_endpoint="$head_node:29500" \
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
        train_fsdp.py --output-dir "$(dirname "$run")" --run-name "$(basename "$run")" \
        --resume auto --checkpoint-interval 500 "$@"
' torchrun "$@" &
code=0
wait $! || code=$?
if [ "$signalled" ]; then # the trap ended that wait
    code=0
    wait $! || code=$?
fi

# what ended early and has saved something since it began goes on; without a new checkpoint it would end so for ever
if [ "$code" -ne 0 ] && [ "$(newest)" != "$before" ]; then
    case $(exit_code) in # of the ranks, as torchrun has 1 for all of them
        0) code=0 ;;
        [23]) code=$(exit_code) ;; # wrong usage, a missed gate: no other start would end otherwise
        *) scontrol requeue "$SLURM_JOB_ID" ;;
    esac
fi
exit "$code"
