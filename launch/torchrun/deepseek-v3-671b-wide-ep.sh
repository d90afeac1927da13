#!/usr/bin/env bash
# DeepSeek-V3 671B, wide expert-parallel rollout on 64 nodes of 8 GPUs. On each of them:
# NODE_RANK=0..63 MASTER_ADDR=<node 0> bash launch/torchrun/deepseek-v3-671b-wide-ep.sh [key=value ...]
NODES=64 GPUS_PER_NODE=8 exec bash launch/torchrun.sh recipes/deepseek-v3-671b-wide-ep.yaml "$@"
