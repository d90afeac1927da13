#!/usr/bin/env bash
# Shared by all scripts in slurm/: slurm.sh RECIPE [key=value ...], inside a job that sbatch has started. Starts one
# process per GPU with srun. A job that is preempted, loses a node or runs out of time is requeued and resumes from its
# last checkpoint.
set -euo pipefail
recipe=$1
shift
ranks_per_node=$SLURM_NTASKS_PER_NODE
world_size=$SLURM_NTASKS
. launch/settings.sh

# Rank 0 runs on the job's first node; its address is the one that SLURM itself uses.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_ADDR=${MASTER_ADDR:-$address}
# Jobs that share a node need different ports, below the range of ephemeral ports of Linux.
export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
# Shared memory is named after the run. The name differs for each start, so that leftovers of a killed start do not
# block the next.
export HYBRID3D_RUN=${HYBRID3D_RUN:-hybrid3d-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}}
# By default a rank may use all of the job's cores on its node: SLURM would bind it to a single core.
export SLURM_CPU_BIND=${SLURM_CPU_BIND:-none}

# --signal=B:USR1@seconds sends this signal before the time limit. After preemption and lost nodes, SLURM itself
# requeues the job.
trap 'echo "requeued: resumes from the last checkpoint"; scontrol requeue "$SLURM_JOB_ID"' USR1

# Runs a job step and stores its exit code in `code`; in the background, because bash handles signals only between
# commands.
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
if ((code == 0)); then # a rank that fails ends the others
    run --kill-on-bad-exit=1 "$PYTHON" -m hybrid3d train "$recipe" "$@"
fi

# When srun gives up on a lost node, SLURM is about to end this script and to requeue the job; if the script ended
# first, the job would not be requeued.
if ((code != 0 && code != 2)) && ! timeout 60 srun "${each_node[@]}" true 2>/dev/null; then
    echo "a node does not answer: waiting for SLURM to requeue the job"
    sleep 1800 &
    wait $!
fi
exit "$code"
