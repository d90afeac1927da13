#!/usr/bin/env bash
# DeepSeek-V3 671B on 96 nodes of 8 GPUs, 64 train and 32 generate. On each of them:
# NODE_RANK=0..95 MASTER_ADDR=<node 0> bash launch/torchrun/deepseek-v3-671b-split.sh [key=value ...]
NODES=96 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/deepseek-v3-671b-split.yaml "$@"
