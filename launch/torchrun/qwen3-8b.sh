#!/usr/bin/env bash
# Qwen3-8B on 1 node of 8 GPUs: bash launch/torchrun/qwen3-8b.sh [key=value ...]
NODES=1 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/qwen3-8b.yaml "$@"
