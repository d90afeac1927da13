#!/usr/bin/env bash
# Qwen3-30B-A3B on 2 nodes of 8 GPUs: sbatch launch/slurm/qwen3-30b-a3b.sh [key=value ...]
#SBATCH --job-name=qwen3-30b-a3b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/qwen3-30b-a3b.yaml "$@"
