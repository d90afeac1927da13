#!/usr/bin/env bash
# GLM-4.5-Air on 8 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..7 MASTER_ADDR=<node 0> bash launch/torchrun/glm-4.5-air.sh [key=value ...]
NODES=8 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/glm-4.5-air.yaml "$@"
