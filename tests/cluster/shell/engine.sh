#!/usr/bin/env bash
# A Docker engine: the one that answers, else one of our own, whose data, log and pid are in $CACHE/engine.
set -euo pipefail

ENGINE=$CACHE/engine
ENGINE_RUN=/run/kdist-engine

# packages WHAT-FOR PACKAGE...: Debian's, installed if they are not there.
packages() {
  local what=$1 missing=() package
  shift
  for package in "$@"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
  ((${#missing[@]})) || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    fail "$what needs ${missing[*]} (Debian's names), which only root on Debian can install here; or set KDIST_E2E=kubeconfig"
  fi
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

engine() {
  docker info >/dev/null 2>&1 && return
  packages "a Docker engine" docker.io iptables runc procps iproute2
  say "starting a Docker engine"
  mkdir -p "$ENGINE"
  engine_is_ours || rm -f "$ENGINE/pid" # what a crash left would keep it from starting
  cp "$HERE/runc-with-fewer-capabilities" "$ENGINE/"
  # Its PATH is the system's: in ours it would take the nodes' containerd for its own. Lowering its OOM score needs CAP_SYS_RESOURCE.
  PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin setsid dockerd \
    --data-root "$ENGINE/data" --exec-root "$ENGINE_RUN" --pidfile "$ENGINE/pid" --oom-score-adjust 0 \
    --log-opt max-size=20m --add-runtime "fewer=$ENGINE/runc-with-fewer-capabilities" --default-runtime fewer \
    >"$ENGINE/log" 2>&1 </dev/null 9>&- &
  wait_for 60 "the engine; see $ENGINE/log" docker info
  # Docker starts the nodes of a cluster that was not removed before; the routes between their pods are gone.
  docker ps -aq --filter "label=io.x-k8s.kind.cluster=$CLUSTER" | xargs -r docker rm -f -v >/dev/null
}

engine_is_ours() { [[ -e $ENGINE/pid && $(ps -o comm= -p "$(cat "$ENGINE/pid")" 2>/dev/null) == dockerd ]]; }

engine_stop() { # only an engine that we started
  local pid
  engine_is_ours || return 0
  pid=$(cat "$ENGINE/pid")
  kill "$pid"
  wait_for 60 "the engine's end" not test -e "/proc/$pid"
  rm -rf "$ENGINE_RUN/containerd/containerd.pid"
  ip link delete docker0 2>/dev/null || true
}

engine_purge() { # what it mounted keeps its folders from being removed
  local folder
  [[ -d $ENGINE || -d $ENGINE_RUN ]] || return 0
  for folder in "$ENGINE" "$ENGINE_RUN"; do
    awk -v folder="$folder/" 'index($5, folder) == 1 {print $5}' /proc/self/mountinfo | sort -r |
      while read -r mount; do umount -l "$mount" || true; done
  done
  rm -rf "$ENGINE" "$ENGINE_RUN"
}

room() { # room GIGABYTES: make that much room on the engine's disk, or say that there is none
  local free
  mkdir -p "$CACHE"
  free=$(df --output=avail -BG "$CACHE" | tail -1 | tr -dc 0-9)
  ((free >= $1)) && return
  say "only $free GB are free: removing images that nothing uses"
  docker image prune -f >/dev/null
  free=$(df --output=avail -BG "$CACHE" | tail -1 | tr -dc 0-9)
  ((free >= $1)) || fail "$free GB are free below $CACHE, and $1 are needed"
}
