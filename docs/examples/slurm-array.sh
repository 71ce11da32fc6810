#!/usr/bin/env bash
# Sixteen jobs with one GPU each, that begin and end when the cluster has room for them.
#SBATCH --job-name=spec-data
#SBATCH --array=0-15
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A-%a.log
set -euo pipefail

spec-data generate --target "${TARGET:-Qwen/Qwen3-8B}" --corpus "${CORPUS:-/shared/chats.jsonl}" --out "${OUT:-/shared/data/qwen3-8b}" --workers auto --device cuda
