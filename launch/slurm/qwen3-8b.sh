#!/usr/bin/env bash
# Qwen3-8B on 1 node of 8 GPUs: sbatch launch/slurm/qwen3-8b.sh [key=value ...]
#SBATCH --job-name=qwen3-8b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/qwen3-8b.yaml "$@"
