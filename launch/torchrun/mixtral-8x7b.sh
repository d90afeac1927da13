#!/usr/bin/env bash
# Mixtral-8x7B on 4 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..3 MASTER_ADDR=<node 0> bash launch/torchrun/mixtral-8x7b.sh [key=value ...]
NODES=4 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/mixtral-8x7b.yaml "$@"
