#!/bin/bash
# sbatch launch/slurm.sh --model llama3.1-8b
# Submit it in the project's folder, on a file system that all nodes share; arguments are train_fsdp.py's. The run's
# folder is outputs/slurm-JOBID, or RUN_FOLDER in sbatch's environment; an existing run is resumed.
# Time limit, failed ranks and nodes, scancel: docs/LAUNCH.md
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

# without a network, fill the hub's cache before and set this
# export HF_HUB_OFFLINE=1
# settings for fabrics, not tried; docs/LAUNCH.md has the lines to look for with NCCL_DEBUG=INFO (GDRDMA, NVLS)
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_NET_GDR_LEVEL=PHB NCCL_NVLS_ENABLE=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds to save; torchrun of torch 2.11 always kills after 30
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # --max-restarts on several nodes: a new store per restart, without addresses of dead ranks

# 120 s before the time limit all ranks save and exit
signalled=
trap 'signalled=yes; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1

# one torchrun per node, which starts one rank per GPU of the job there; if one fails, all end
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

# requeue a job that ended early with a new checkpoint; without one it would fail the same way again
if [ "$code" -ne 0 ] && [ "$(newest)" != "$before" ]; then
    case $(exit_code) in # of the ranks, as torchrun has 1 for all of them
        0) code=0 ;;
        [23]) code=$(exit_code) ;; # wrong usage or a missed gate: another start would end the same way
        *) scontrol requeue "$SLURM_JOB_ID" ;;
    esac
fi
exit "$code"
