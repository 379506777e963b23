#!/usr/bin/env bash
# Kubernetes and its friends as programs in $BIN, built from source with Go; each is built once for each version.
set -euo pipefail

# build NAME STAMP COMMAND...: run the command, which must leave $BIN/NAME, unless this version is there.
build() {
  local name=$1 stamp=$BIN/.$1@$2
  shift 2
  [[ -x $BIN/$name && -e $stamp ]] && return
  command -v go >/dev/null || fail "building $name needs Go 1.26 or newer"
  say "building $name"
  mkdir -p "$BIN"
  CGO_ENABLED=0 "$@" 2> >(grep -v '^go: downloading' >&2)
  rm -f "$BIN/.$name@"*
  touch "$stamp"
}

build_module() { # build_module FOLDER NAME PACKAGE: from a module of ours, whose go.sum pins all it needs
  local flags="-s -w" version=k8s.io/component-base/version folder=$HERE/programs/$1
  [[ $1 == kubernetes ]] && flags+=" -X $version.gitVersion=v$KUBERNETES -X $version.gitMajor=${KUBERNETES%%.*} \
    -X $version.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES") -X $version.gitTreeState=clean"
  build "$2" "$(cat "$folder/go.mod" "$folder/go.sum" | sha256sum | cut -c-12)" \
    go build -C "$folder" -trimpath -ldflags "$flags" -o "$BIN/$2" "$3"
}

build_tool() { # build_tool NAME: from its line in versions.txt
  local package
  package=$(awk -v name="$1" '$1 == name {print $2}' "$HERE/programs/versions.txt")
  build "$1" "${package##*@}" install_tool "$1" "$package"
}

install_tool() {
  local folder
  folder=$(mktemp -d -p "$CACHE")
  GOBIN=$folder go install -trimpath -ldflags "-s -w" "$2"
  mv "$folder"/* "$BIN/$1"
  rmdir "$folder"
}

client_programs() {
  build_module kubernetes kubectl k8s.io/kubernetes/cmd/kubectl
  build_tool kind
  build_tool registry
  build_tool helm
  build_tool helm3
  build_tool kubeconform
  build_tool versitygw
  build_module kube-linter kube-linter golang.stackrox.io/kube-linter/cmd/kube-linter
}

node_programs() {
  local name
  for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl kubeadm; do
    build_module kubernetes "$name" "k8s.io/kubernetes/cmd/$name"
  done
  build_module kubernetes etcd go.etcd.io/etcd/server/v3
  build_module crictl crictl sigs.k8s.io/cri-tools/cmd/crictl
  for name in containerd containerd-shim-runc-v2 ctr coredns; do build_tool "$name"; done
}

operator_program() {
  case $1 in
    jobset) build_module jobset jobset sigs.k8s.io/jobset ;;
    kueue) build_module kueue kueue sigs.k8s.io/kueue/cmd/kueue ;;
    training-operator) build_tool "$1" ;;
    trainer | trainer-controller-manager) build_tool trainer-controller-manager ;;
    *) fail "no operator $1: there are ${OPERATORS[*]}" ;;
  esac
}
