#!/usr/bin/env bash
# DeepSeek-V3 671B, wide expert-parallel rollout on 64 nodes of 8 GPUs.
# sbatch launch/slurm/deepseek-v3-671b-wide-ep.sh [key=value ...]
#SBATCH --job-name=deepseek-v3-671b-wide-ep
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
exec bash launch/slurm.sh recipes/deepseek-v3-671b-wide-ep.yaml "$@"
