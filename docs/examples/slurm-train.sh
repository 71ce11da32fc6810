#!/usr/bin/env bash
# Two machines with eight GPUs each train one draft. Submit the same script again after a kill or a
# time limit: the run resumes from its last checkpoint.
#SBATCH --job-name=spec-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

export DATA=${DATA:-/shared/data/qwen3-8b} OUT=${OUT:-/shared/runs/qwen3-8b}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD OMP_NUM_THREADS=8

srun bash -c 'torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node 8 \
    --master-addr "$HEAD" --master-port 29500 -m spec_train fit eagle3 --data "$DATA" --out "$OUT"'
