#!/usr/bin/env bash
# DeepSeek-V3 671B on 96 nodes of 8 GPUs, 64 train and 32 generate: sbatch launch/slurm/deepseek-v3-671b-split.sh [key=value ...]
#SBATCH --job-name=deepseek-v3-671b-split
#SBATCH --nodes=96
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/deepseek-v3-671b-split.yaml "$@"
