#!/usr/bin/env bash
# Llama-3.1-70B on 8 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..7 MASTER_ADDR=<node 0> bash launch/torchrun/llama-3.1-70b.sh [key=value ...]
NODES=8 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/llama-3.1-70b.yaml "$@"
