#!/usr/bin/env bash
# GLM-4.5-Air on 8 nodes of 8 GPUs: sbatch launch/slurm/glm-4.5-air.sh [key=value ...]
#SBATCH --job-name=glm-4.5-air
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
exec bash launch/slurm.sh recipes/glm-4.5-air.yaml "$@"
