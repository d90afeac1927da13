#!/usr/bin/env bash
# Llama-3.1-70B on 8 nodes of 8 GPUs: sbatch launch/slurm/llama-3.1-70b.sh [key=value ...]
#SBATCH --job-name=llama-3.1-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/llama-3.1-70b.yaml "$@"
