#!/usr/bin/env bash
# The body of every script in slurm/: slurm.sh RECIPE [key=value ...], inside a job that sbatch has started.
# One process per GPU, started by srun. A job that is preempted, loses a node or runs out of time is requeued and goes
# on from its last checkpoint.
set -euo pipefail
recipe=$1
shift
ranks_per_node=$SLURM_NTASKS_PER_NODE
world_size=$SLURM_NTASKS
. launch/settings.sh

# Rank 0 is on the job's first node: the address by which SLURM itself reaches that one.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_ADDR=${MASTER_ADDR:-$address}
# Jobs that share a node must not share a port; below the range that Linux hands out by itself.
export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
# Names shared memory. Of its own for each start: what a killed start left behind would stop the next.
export HYBRID3D_RUN=${HYBRID3D_RUN:-hybrid3d-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}}
# Unless asked otherwise, a rank may use all of the job's cores on its node: SLURM would bind it to a single one.
export SLURM_CPU_BIND=${SLURM_CPU_BIND:-none}

srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    bash launch/prepare-node.sh "$ranks_per_node" "$world_size"

# --signal=B:USR1@seconds sends this before the time is up. Preemption and lost nodes requeue without our help.
requeue() {
    echo "requeued: goes on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1

# In the background, because bash handles signals between commands only; one rank that fails ends the others.
srun --kill-on-bad-exit=1 "$PYTHON" -m hybrid3d train "$recipe" "$@" &
step=$!
while true; do
    code=0
    wait "$step" || code=$?
    kill -0 "$step" 2>/dev/null || exit "$code"
done
