#!/usr/bin/env bash
# Before the ranks of a node start: prepare-node.sh RANKS_HERE RANKS_IN_ALL. Limits that do not suffice are one message
# with all of them, and exit code 2.
set -euo pipefail
ranks=$1 world=$2
problems=()

# What earlier starts of this job left: a job that is killed has no time to tidy up.
[[ -z ${SLURM_JOB_ID:-} ]] || rm -f /dev/shm/*hybrid3d-"$SLURM_JOB_ID"-*

# NCCL's documentation gives a container 1 GiB for 8 GPUs; vLLM's message queues are here too.
shm=$(df --output=avail --block-size=1M /dev/shm | tail -n 1 | tr -d ' ')
needed=$((128 * ranks))
if ((shm < needed)); then
    problems+=("/dev/shm has $shm MiB free, $ranks ranks need $needed: start the container with --shm-size=${needed}m" \
        "    or --ipc=host; without one: mount -o remount,size=${needed}m /dev/shm (as root)")
fi

# Each of a rank's gloo groups keeps a socket to each of its members, and some groups have all ranks: room for eight of
# them. With four ranks the demo has 210 files open, 73 of them sockets.
files=$(ulimit -n)
needed=$((1024 + 8 * world))
if [[ $files != unlimited ]] && ((files < needed)); then
    problems+=("ulimit -n is $files, $world ranks need $needed: raise the hard limit in /etc/security/limits.conf," \
        "    or LimitNOFILE of slurmd, or start the container with --ulimit nofile=$needed")
fi

# InfiniBand registers memory, which must be locked; without InfiniBand nothing is.
locked=$(ulimit -l)
if [[ -n $(ls /sys/class/infiniband 2>/dev/null) && $locked != unlimited ]]; then
    problems+=("ulimit -l is $locked KiB, InfiniBand needs unlimited: raise memlock in /etc/security/limits.conf," \
        "    or LimitMEMLOCK of slurmd, or start the container with --ulimit memlock=-1")
fi

if ((${#problems[@]})); then
    {
        echo "$(hostname): too little for a run"
        printf '  %s\n' "${problems[@]}"
    } >&2
    exit 2
fi
