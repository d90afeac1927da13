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

# --signal=B:USR1@seconds sends this before the time is up. Preemption and lost nodes requeue without our help.
trap 'echo "requeued: goes on from the last checkpoint"; scontrol requeue "$SLURM_JOB_ID"' USR1

# A step of this job; its exit code in `code`. In the background, because bash handles signals between commands only.
run() {
    srun "$@" &
    local step=$!
    while true; do
        code=0
        wait "$step" || code=$?
        kill -0 "$step" 2>/dev/null || return 0
    done
}

each_node=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
run "${each_node[@]}" bash launch/prepare-node.sh "$ranks_per_node" "$world_size"
if ((code == 0)); then # one rank that fails ends the others
    run --kill-on-bad-exit=1 "$PYTHON" -m hybrid3d train "$recipe" "$@"
fi

# srun gives up on a lost node when SLURM has noticed too, and is about to end this script and to requeue the job: one
# that ends by itself first would not be requeued.
if ((code != 0 && code != 2)) && ! timeout 60 srun "${each_node[@]}" true 2>/dev/null; then
    echo "a node does not answer: waiting for SLURM to requeue the job"
    sleep 1800 &
    wait $!
fi
exit "$code"
