#!/usr/bin/env bash
# The demo: 4 ranks on this machine's cores, no GPU. bash launch/torchrun/demo-cpu.sh [key=value ...]
NODES=1 GPUS_PER_NODE=4 exec bash launch/torchrun.sh recipes/demo-cpu.yaml "$@"
