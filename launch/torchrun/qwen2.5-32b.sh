#!/usr/bin/env bash
# Qwen2.5-32B on 4 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..3 MASTER_ADDR=<node 0> bash launch/torchrun/qwen2.5-32b.sh [key=value ...]
NODES=4 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/qwen2.5-32b.yaml "$@"
