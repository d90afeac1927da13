#!/usr/bin/env bash
# Kimi-K2 1T on 64 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..63 MASTER_ADDR=<node 0> bash launch/torchrun/kimi-k2-1t.sh [key=value ...]
NODES=64 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/kimi-k2-1t.yaml "$@"
