#!/bin/sh
# Two hosts on one machine: a command of shardproof under torchrun, an agent on each.
#
#   two_hosts.sh train --mesh dp=2 --engine torchrun --steps 2
#
# A host is a network namespace, joined to the other by a veth pair; nothing of it is seen from outside. Where the user
# may make none, or if TWO_HOSTS is loopback, both agents are here and meet over loopback. The status is the larger one
# of the two. PYTHON is the interpreter, MODULE what it runs, RANKS how many ranks a host has, PORT where the agents meet.

set -u
PYTHON=${PYTHON:-python3} MODULE=${MODULE:-shardproof} RANKS=${RANKS:-1} PORT=${PORT:-29500}

agent() { # its address, its interface, whether the store is here, the store's address; then the command
  own=$1 is_host=$3 store=$4
  export GLOO_SOCKET_IFNAME="$2" NCCL_SOCKET_IFNAME="$2"
  shift 4
  exec "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node "$RANKS" --local-addr "$own" \
    --rdzv-backend c10d --rdzv-endpoint "$store:$PORT" --rdzv-conf "is_host=$is_host" --rdzv-id two_hosts \
    -m "$MODULE" "$@"
}

larger() { # of the statuses of two processes, once both have ended
  wait "$1"
  one=$?
  wait "$2"
  other=$?
  [ "$one" -gt "$other" ] && return "$one"
  return "$other"
}

case ${1-} in
"" | --help)
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  exit 2
  ;;
--east) # in the first namespace: it makes the other one, and the pair between them
  shift
  ip link set lo up && ip link add name east type veth peer name west || exit 2
  unshare --net "$0" --west "$@" &
  west=$!
  while ip link show west >/dev/null 2>&1; do # until the other namespace is there
    ip link set dev west netns "$west" 2>/dev/null
    sleep 0.05
  done
  exec 9<"/proc/$west/ns/net" # a host is there although its agent is killed
  ip addr add 10.99.0.1/24 dev east && ip link set east up || exit 2
  agent 10.99.0.1 east true 10.99.0.1 "$@" &
  trap 'kill $! "$west" 2>/dev/null' INT TERM
  larger $! "$west"
  exit
  ;;
--west)
  shift
  until ip link show west >/dev/null 2>&1; do sleep 0.05; done
  ip link set lo up && ip addr add 10.99.0.2/24 dev west && ip link set west up || exit 2
  agent 10.99.0.2 west false 10.99.0.1 "$@"
  ;;
esac

private=
for how in "unshare --net" "unshare --user --map-root-user --net"; do
  [ "${TWO_HOSTS:-}" = loopback ] || [ -n "$private" ] && break
  $how sh -c 'ip link add name east type veth peer name west' 2>/dev/null && private=$how
done
if [ -n "$private" ]; then
  echo "two hosts: two network namespaces and a veth pair" >&2
  exec $private "$0" --east "$@"
fi
echo "two hosts: two agents over loopback" >&2
agent 127.0.0.1 lo true 127.0.0.1 "$@" &
first=$!
agent 127.0.0.1 lo false 127.0.0.1 "$@" &
trap 'kill "$first" $! 2>/dev/null' INT TERM
larger "$first" $!
