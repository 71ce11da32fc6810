#!/usr/bin/env bash
# Eight machines with eight GPUs each: 64 workers share one directory. Submit the same script again
# after a kill or a time limit: finished units are kept. The worker that finishes last seals.
#SBATCH --job-name=spec-data
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

TARGET=${TARGET:-Qwen/Qwen3-8B}
CORPUS=${CORPUS:-/shared/chats.jsonl}
OUT=${OUT:-/shared/data/qwen3-8b}

export HF_HUB_OFFLINE=1 # the target was downloaded before, to a disk that every machine sees
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"

srun --kill-on-bad-exit=0 spec-data generate --target "$TARGET" --corpus "$CORPUS" --out "$OUT" --workers auto --device cuda
srun --nodes=1 --ntasks=1 --gpus=1 spec-data verify "$OUT" --target "$TARGET" --samples 32
