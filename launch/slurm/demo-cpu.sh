#!/usr/bin/env bash
# The demo: 4 ranks on the cores of 2 nodes, no GPU. sbatch launch/slurm/demo-cpu.sh [key=value ...]
#SBATCH --job-name=demo-cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec bash launch/slurm.sh recipes/demo-cpu.yaml "$@"
