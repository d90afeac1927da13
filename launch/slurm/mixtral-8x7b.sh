#!/usr/bin/env bash
# Mixtral-8x7B on 4 nodes of 8 GPUs: sbatch launch/slurm/mixtral-8x7b.sh [key=value ...]
#SBATCH --job-name=mixtral-8x7b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/mixtral-8x7b.yaml "$@"
