#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces with a cable between them, in one Ray cluster. Needs root and iproute2.
#
# It runs `palestra` with these arguments on the first of them; the cluster is 10.77.0.1:6379.
#
#   benchmarks/two_hosts.sh sweep grid.yaml --parallel 4 --on 10.77.0.1:6379
#   DELAY=0.05 LOSS=0.01 benchmarks/two_hosts.sh train …     # through a relay that is slow and loses packets
#   benchmarks/two_hosts.sh train grpo.yaml 'cluster={trainers: 2, generators: 2, address: "10.77.0.1:6379"}'
set -euo pipefail

here=$$
first=pa$here second=pb$here
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 # the cable is private

relay=
clean() {
  for host in $first $second; do
    ip netns pids $host 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
    ip netns del $host 2>/dev/null || true
  done
  [ -z "$relay" ] || kill $relay 2>/dev/null || true
}
trap clean EXIT

on() { # HOST COMMAND…: with a host name of its own
  ip netns exec "$1" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$@"
}

for host in $first $second; do
  ip netns add $host
  ip -n $host link set lo up
done
if [ -n "${DELAY:-}" ]; then
  coproc python "$(dirname "$0")/relay.py" $first 10.77.0.1/24 $second 10.77.0.2/24 --delay "$DELAY" --loss "${LOSS:-0.01}"
  relay=$COPROC_PID
  read -r _ <&"${COPROC[0]}"
else
  ip link add va$here netns $first type veth peer name vb$here netns $second
  ip -n $first addr add 10.77.0.1/24 dev va$here
  ip -n $second addr add 10.77.0.2/24 dev vb$here
  ip -n $first link set va$here up
  ip -n $second link set vb$here up
fi

cores=$(getconf _NPROCESSORS_ONLN) # nproc obeys OMP_NUM_THREADS
on $first ray start --head --block --port 6379 --node-ip-address 10.77.0.1 --num-cpus "$cores" \
  --include-dashboard false --disable-usage-stats --temp-dir "/tmp/$first" >"/tmp/$first.log" 2>&1 &
until on $first python -c 'import socket; socket.create_connection(("10.77.0.1", 6379), 1)' 2>/dev/null; do sleep 0.5; done
on $second ray start --block --address 10.77.0.1:6379 --node-ip-address 10.77.0.2 --num-cpus "$cores" \
  --disable-usage-stats >"/tmp/$second.log" 2>&1 &
until [ "$(on $first python -c '
import ray
ray.init("10.77.0.1:6379", log_to_driver=False, logging_level="error")
print(int(ray.cluster_resources()["CPU"]))' 2>/dev/null | tail -1)" = $((2 * cores)) ]; do sleep 1; done
on $first palestra "$@"
