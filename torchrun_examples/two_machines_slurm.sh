#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
# Two machines of eight GPUs by Slurm: sbatch two_machines_slurm.sh CKPT_DIR IN OUT
# One torchrun per machine; the first machine of the job is where all meet. --resume and --requeue:
# a job that Slurm starts again, after a machine has failed, does what is missing.
set -euo pipefail
usage="usage: sbatch $0 CKPT_DIR IN OUT"
ckpt_dir=${1:?$usage} in_file=${2:?$usage} out_file=${3:?$usage}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)  # head would leave, and pipefail tell
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${RANKS_PER_MACHINE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
    -m llama batch "$in_file" "$out_file" --resume --ckpt_dir "$ckpt_dir"
