#!/usr/bin/env bash
# Qwen3-235B-A22B on 16 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..15 MASTER_ADDR=<node 0> bash launch/torchrun/qwen3-235b-a22b.sh [key=value ...]
NODES=16 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/qwen3-235b-a22b.yaml "$@"
