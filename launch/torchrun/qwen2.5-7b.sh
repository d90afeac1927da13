#!/usr/bin/env bash
# Qwen2.5-7B on 1 node of 8 GPUs: bash launch/torchrun/qwen2.5-7b.sh [key=value ...]
NODES=1 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/qwen2.5-7b.yaml "$@"
