#!/usr/bin/env bash
# Kubernetes and its friends as programs in $BIN, built from source with Go; each is built once for each version.
# Most are of one module: so what they share, such as Kubernetes' client, is compiled once, a third of all there is.
set -euo pipefail

program() { # program NAME...: as programs.txt says; each is in $BIN afterwards
  local name package module
  for name in "$@"; do
    read -r _ package module < <(grep "^$name " "$HERE/programs/programs.txt") || fail "no program $name: see $HERE/programs/programs.txt"
    build "$name" "$package" "$HERE/programs/${module:-kubernetes}"
  done
}

build() { # build NAME PACKAGE MODULE-FOLDER, unless this version is there
  local name=$1 package=$2 module=$3 flags="-s -w" version=k8s.io/component-base/version stamp
  stamp=$BIN/.$name@$(find "$module" -type f | sort | xargs cat | sha256sum | cut -c-12)
  [[ -x $BIN/$name && -e $stamp ]] && return
  command -v go >/dev/null || fail "building $name needs Go 1.26.6 or newer"
  say "building $name"
  mkdir -p "$BIN"
  [[ $package != k8s.io/* ]] || flags+=" -X $version.gitVersion=v$KUBERNETES -X $version.gitMajor=${KUBERNETES%%.*} \
    -X $version.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES") -X $version.gitTreeState=clean"
  # The compiler holds some hundred megabytes at most, and collects less often.
  CGO_ENABLED=0 GOGC=400 go build -C "$module" -trimpath -ldflags "$flags" -o "$BIN/$name" "$package" 2> >(grep -v '^go: downloading' >&2)
  rm -f "$BIN/.$name@"*
  touch "$stamp"
}

module_folder() { # module_folder MODULE [FOLDER]: where its files are, such as its manifests
  local folder=$HERE/programs/${2:-kubernetes}
  go mod download -C "$folder" "$1"
  go list -C "$folder" -m -f '{{.Dir}}' "$1"
}

client_programs() { program kubectl kind registry helm helm3 kubeconform versitygw kube-linter; }
node_programs() {
  program kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubeadm etcd crictl \
    containerd containerd-shim-runc-v2 ctr coredns pause
}
