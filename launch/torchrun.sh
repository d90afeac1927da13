#!/usr/bin/env bash
# Shared by all scripts in torchrun/: torchrun.sh RECIPE [key=value ...], on each node. Starts one process per GPU.
# NODES and GPUS_PER_NODE come from the script; torchrun's NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT come from the
# environment.
set -euo pipefail
recipe=$1
shift
NNODES=${NNODES:-$NODES}
MASTER_PORT=${MASTER_PORT:-29500}
ranks_per_node=${NPROC_PER_NODE:-$GPUS_PER_NODE}
world_size=$((NNODES * ranks_per_node))
. launch/settings.sh

if ((NNODES > 1)) && [[ -z ${NODE_RANK:-} || -z ${MASTER_ADDR:-} ]]; then
    echo "$recipe runs on $NNODES nodes: set NODE_RANK (0 to $((NNODES - 1))) and MASTER_ADDR (node 0) on each" >&2
    exit 2
fi
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}

# Shared memory is named after the run. The name differs for each start, so that leftovers of a killed start do not
# block the next.
export HYBRID3D_RUN=${HYBRID3D_RUN:-hybrid3d-$(date +%s)-$$}

bash launch/prepare-node.sh "$ranks_per_node" "$world_size"
if ((NNODES > 1)); then # torchrun itself would wait for fifteen minutes and fail with a traceback
    RANK=$NODE_RANK WORLD_SIZE=$NNODES MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT \
        "$PYTHON" -m hybrid3d.launch.rendezvous "$recipe" "$@"
fi
exec "$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --node-rank="$NODE_RANK" \
    --nproc-per-node="$ranks_per_node" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    -m hybrid3d train "$recipe" "$@"
