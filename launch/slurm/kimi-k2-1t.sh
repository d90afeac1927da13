#!/usr/bin/env bash
# Kimi-K2 1T on 64 nodes of 8 GPUs: sbatch launch/slurm/kimi-k2-1t.sh [key=value ...]
#SBATCH --job-name=kimi-k2-1t
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/kimi-k2-1t.yaml "$@"
