#!/usr/bin/env bash
# DeepSeek-V3 671B on 128 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..127 MASTER_ADDR=<node 0> bash launch/torchrun/deepseek-v3-671b.sh [key=value ...]
NODES=128 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/deepseek-v3-671b.yaml "$@"
