#!/usr/bin/env bash
# Checks a node before its ranks start: prepare-node.sh LOCAL_RANKS WORLD_SIZE. If limits are too low, it prints all of
# them in one message and exits with code 2.
set -euo pipefail
ranks=$1 world=$2
problems=()

# Remove shared memory of earlier starts of this job: a killed job cannot clean up.
[[ -z ${SLURM_JOB_ID:-} ]] || rm -f /dev/shm/*hybrid3d-"$SLURM_JOB_ID"-*

# NCCL's documentation recommends 1 GiB for a container with 8 GPUs; vLLM's message queues are here too.
shm=$(df --output=avail --block-size=1M /dev/shm | tail -n 1 | tr -d ' ')
needed=$((128 * ranks))
if ((shm < needed)); then
    problems+=("/dev/shm has $shm MiB free, $ranks ranks need $needed: start the container with --shm-size=${needed}m" \
        "    or --ipc=host; without one: mount -o remount,size=${needed}m /dev/shm (as root)")
fi

# Each gloo group of a rank keeps a socket per member, and some groups contain all ranks: the limit allows for eight of
# them. With four ranks, the demo has 210 open files, 73 of them sockets.
files=$(ulimit -n)
needed=$((1024 + 8 * world))
if [[ $files != unlimited ]] && ((files < needed)); then
    problems+=("ulimit -n is $files, $world ranks need $needed: raise the hard limit in /etc/security/limits.conf," \
        "    or LimitNOFILE of slurmd, or start the container with --ulimit nofile=$needed")
fi

# InfiniBand registers memory, which must be locked; without InfiniBand no memory is locked.
locked=$(ulimit -l)
if [[ -n $(ls /sys/class/infiniband 2>/dev/null) && $locked != unlimited ]]; then
    problems+=("ulimit -l is $locked KiB, InfiniBand needs unlimited: raise memlock in /etc/security/limits.conf," \
        "    or LimitMEMLOCK of slurmd, or start the container with --ulimit memlock=-1")
fi

if ((${#problems[@]})); then
    {
        echo "$(hostname): limits are too low for a run"
        printf '  %s\n' "${problems[@]}"
    } >&2
    exit 2
fi
