#!/usr/bin/env bash
# Qwen3-30B-A3B on 2 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..1 MASTER_ADDR=<node 0> bash launch/torchrun/qwen3-30b-a3b.sh [key=value ...]
NODES=2 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/qwen3-30b-a3b.yaml "$@"
