#!/bin/bash
# Two hosts on one machine: network namespaces with a veth link between them (10.77.0.1 and 10.77.0.2), each under a host
# name of its own. For tests and benchmarks; needs root, ip (iproute2) and unshare.
#
#   two_hosts.sh with COMMAND ...          sets the hosts up, runs COMMAND, and removes them whatever happens; COMMAND finds
#                                          MUSTER_TWO_HOSTS set, by which the calls below know which hosts are meant
#   two_hosts.sh check                     says "skipped: ..." and fails where this machine cannot do it
#   two_hosts.sh mpirun openmpi|mpich N PROGRAM ...   N ranks on each host
#   two_hosts.sh on 0|1 COMMAND ...        runs COMMAND on that host
#   two_hosts.sh limit RATE|none           both directions of the link, in tc's words: 1gbit, 10gbit
#   two_hosts.sh cut | mend                takes the link down, and up again
#   two_hosts.sh pids 0|1                  of the processes on that host
#   two_hosts.sh up | down                 by hand; MUSTER_TWO_HOSTS names them
#
# Nothing of it has a name outside the namespaces, so several may exist at once. What runs in them ends with them.
set -u
self=$(readlink -f "$0")

space() { echo "muster-$MUSTER_TWO_HOSTS-$1"; }
name() { echo "mh$MUSTER_TWO_HOSTS-$1"; }

check()
{
    local what
    for what in ip tc unshare; do
        command -v "$what" > /dev/null || { echo "skipped: $what is not installed (scripts/deps.sh check)"; return 1; }
    done
    [ "$(id -u)" = 0 ] || { echo "skipped: network namespaces need root"; return 1; }
    MUSTER_TWO_HOSTS=check-$$
    if ! up > /dev/null 2>&1; then
        down
        echo "skipped: this machine does not let us make network namespaces"
        return 1
    fi
    down
}

up()
{
    local i
    for i in 0 1; do
        ip netns add "$(space $i)" || return 1
    done
    ip link add link0 netns "$(space 0)" type veth peer name link1 netns "$(space 1)" || return 1
    for i in 0 1; do
        ip -n "$(space $i)" addr add 10.77.0.$((i + 1))/24 dev link$i && ip -n "$(space $i)" link set link$i up &&
            ip -n "$(space $i)" link set lo up || return 1
    done
}

down()
{
    local i pids
    for i in 0 1; do
        pids=$(ip netns pids "$(space $i)" 2> /dev/null)
        [ -z "$pids" ] || kill -9 $pids 2> /dev/null
        ip netns del "$(space $i)" 2> /dev/null
    done
}

on()
{
    local i=$1
    shift
    exec ip netns exec "$(space "$i")" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$(name "$i")" "$@"
}

# In the place of ssh: [options] HOST WORDS..., which a shell is to read.
agent()
{
    while [[ $1 == -* ]]; do shift; done
    local host=$1
    shift
    on $((${host##*.} - 1)) bash -c "$*"
}

limit()
{
    local i
    for i in 0 1; do
        ip netns exec "$(space $i)" tc qdisc del dev link$i root 2> /dev/null
        [ "$1" = none ] || ip netns exec "$(space $i)" tc qdisc add dev link$i root tbf rate "$1" burst 256kb latency 50ms || return 1
    done
}

run_mpi()
{
    local mpi=$1 each=$2
    shift 2
    export MUSTER_TWO_HOSTS_AGENT=1
    case $mpi in
    openmpi)
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        # Which variables go along has to be said to this one.
        local send=() v
        for v in $(compgen -e | grep -E '^(MUSTER_|OMP_|MALLOC_|GLIBC_)'); do send+=(-x "$v"); done
        on 0 mpirun.openmpi -np $((2 * each)) --host 10.77.0.1:$each,10.77.0.2:$each --oversubscribe --bind-to none \
            --mca plm_rsh_agent "$self" --mca oob_tcp_if_include 10.77.0.0/24 --mca btl tcp,vader,self \
            --mca btl_tcp_if_include 10.77.0.0/24 --mca mpi_yield_when_idle 1 "${send[@]}" "$@" ;;
    mpich)
        on 0 mpirun.mpich -n $((2 * each)) -hosts 10.77.0.1:$each,10.77.0.2:$each -launcher ssh -launcher-exec "$self" \
            -localhost 10.77.0.1 "$@" ;;
    *) echo "two_hosts.sh mpirun: $mpi; openmpi or mpich was expected" >&2; exit 2 ;;
    esac
}

# An MPI calls us as it would call ssh.
if [ -n "${MUSTER_TWO_HOSTS_AGENT:-}" ] && [[ $* == *10.77.0.* && ${1:-} != on ]]; then
    agent "$@"
fi
verb=${1:-}
[ $# -eq 0 ] || shift
case $verb in with | check) ;; *)
    [ -n "${MUSTER_TWO_HOSTS:-}" ] || { echo "two_hosts.sh: MUSTER_TWO_HOSTS names no hosts; see the head of $self" >&2; exit 2; } ;;
esac
case $verb in
check) check ;;
with)
    export MUSTER_TWO_HOSTS=$$
    trap down EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    up || { echo "two_hosts.sh: cannot set up two hosts" >&2; exit 1; }
    "$@" & # so that a signal does not wait for its end
    wait $! ;;
mpirun) run_mpi "$@" ;;
on) on "$@" ;;
limit) limit "$1" ;;
cut) ip -n "$(space 0)" link set link0 down ;;
mend) ip -n "$(space 0)" link set link0 up ;;
pids) ip netns pids "$(space "$1")" ;;
up) up || { down; exit 1; } ;;
down) down ;;
*) echo "two_hosts.sh: what is '$verb'? See the head of $self" >&2; exit 2 ;;
esac
