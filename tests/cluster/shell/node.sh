#!/usr/bin/env bash
# The node's image: kind's own where it can be pulled, else made from Debian and the programs we built.
set -euo pipefail

# Others are made when programs change.
NODE_TAG=v$KUBERNETES-$(find "$HERE/programs" "$HERE/shell/node.sh" -type f | sort | xargs cat | sha256sum | cut -c-12)
NODE_IMAGE=kdist/node:$NODE_TAG
NODE_BASE=kdist/node-base:$NODE_TAG

# binary_image NAME:TAG BINARY PATH-IN-IMAGE [BASE [USER]]: an image of one program
binary_image() {
  local folder
  folder=$(mktemp -d -p "$CACHE")
  cp "$2" "$folder/binary"
  printf '%s\n' "FROM ${4:-scratch}" "COPY binary $3" \
    'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "ENTRYPOINT [\"$3\"]" "USER ${5:-0}" >"$folder/Dockerfile"
  DOCKER_BUILDKIT=0 docker build -q -t "$1" "$folder" >/dev/null 2>"$folder/log" || fail "$(cat "$folder/log")"
  rm -rf "$folder"
}

kind_node() { # name of the image that this version of kind was released with
  sed -n 's/.*"\(kindest\/node:[^"]*\)".*/\1/p' "$(module_folder sigs.k8s.io/kind)/pkg/apis/config/defaults/image.go"
}
have_image() { docker image inspect "$1" >/dev/null 2>&1; }
can_pull() { # asked once: a machine without a way out would wait each time
  [[ ! -e $CACHE/cannot-pull ]] || return 1
  have_image "$(kind_node)" || timeout 300 docker pull -q "$(kind_node)" >/dev/null 2>&1 || { touch "$CACHE/cannot-pull"; return 1; }
}

node_image() { # leaves its name in $NODE
  if have_image "$NODE_IMAGE"; then export CHOSEN=$NODE_IMAGE; return; fi
  if can_pull; then export CHOSEN; CHOSEN=$(kind_node); return; fi
  room 15
  node_programs
  node_base
  say "making the node image"
  preload
  docker images --format '{{.Repository}}:{{.Tag}}' | grep '^kdist/node' | grep -v ":$NODE_TAG$" | xargs -r docker image rm >/dev/null
  export CHOSEN=$NODE_IMAGE
}

node_base() { # what kind's images/base/Dockerfile makes
  have_image "$NODE_BASE" && return
  packages "making a node's image" debootstrap jq containernetworking-plugins
  say "making the node's base image"
  local root kind
  root=$(mktemp -d -p "$CACHE")
  kind=$(module_folder sigs.k8s.io/kind)/images/base/files
  debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,conntrack,iptables,iproute2,ethtool,socat,util-linux,mount,kmod,libseccomp2,ca-certificates,curl,jq,procps,runc \
    bookworm "$root" >/dev/null
  cp -r --no-preserve=mode "$kind/." "$root/"
  chmod 755 "$root"/kind "$root"/kind/bin "$root"/kind/bin/* "$root"/usr/local/bin/*
  quiet_systemd "$root"
  mkdir -p "$root/etc/kubernetes/manifests" "$root/opt/cni/bin" "$root/kind/manifests"
  cp "$BIN"/{containerd,containerd-shim-runc-v2,ctr,crictl} "$root/usr/local/bin/"
  cp "$BIN"/{kubeadm,kubelet,kubectl} "$root/usr/bin/"
  cp /usr/lib/cni/* "$root/opt/cni/bin/"
  ln -sf /usr/sbin/runc "$root/usr/local/sbin/runc"
  echo -n "v$KUBERNETES" >"$root/kind/version"
  # Lowering an OOM score needs CAP_SYS_RESOURCE, which a confined machine has not.
  sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$root/etc/containerd/config.toml"
  sed -i '/OOMScoreAdjust/d' "$root/etc/systemd/system/containerd.service"
  chroot "$root" ctr oci spec |
    jq '.hooks.createContainer = [{"path": "/kind/bin/mount-product-files.sh"}] | del(.process.rlimits)' >"$root/etc/containerd/cri-base.json"
  import "$root" "$NODE_BASE" -c 'ENTRYPOINT ["/usr/local/bin/entrypoint","/sbin/init"]' -c 'ENV container=docker'
}

quiet_systemd() { # in the root that kind's Dockerfile makes, only what a node needs is started
  local units=$1/lib/systemd/system
  find "$units/sysinit.target.wants/" -name systemd-tmpfiles-setup.service -delete
  rm -f "$units"/{multi-user,local-fs,basic}.target.wants/* "$1"/etc/systemd/system/*.wants/* "$units"/sockets.target.wants/*{udev,initctl}*
  echo ReadKMsg=no >>"$1/etc/systemd/journald.conf"
  chroot "$1" systemctl -q enable kubelet.service containerd.service undo-mount-hacks.service
  chroot "$1" systemctl -q mask systemd-binfmt.service
}

import() { # import FOLDER NAME [CHANGE...]: a root file system becomes an image
  local root=$1 name=$2
  shift 2
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
  tar -C "$root" -c . | docker import "$@" - "$name" >/dev/null
  rm -rf "$root"
}

preload() { # Kubernetes' own images go into the node's store, as kind's `build node-image` does it
  local folder image name images
  folder=$(mktemp -d -p "$CACHE")
  # The second is the sandbox that kind's containerd asks for.
  mapfile -t images < <("$BIN/kubeadm" config images list --kubernetes-version "v$KUBERNETES" 2>/dev/null; echo registry.k8s.io/pause:3.10)
  for image in "${images[@]}"; do
    name=${image##*/} name=${name%%:*}
    case $name in
      pause) binary_image "$image" "$BIN/pause" /pause ;;
      coredns) binary_image "$image" "$BIN/coredns" /coredns ;;
      kube-proxy) binary_image "$image" "$BIN/kube-proxy" /usr/local/bin/kube-proxy "$NODE_BASE" ;;
      *) binary_image "$image" "$BIN/$name" "/usr/local/bin/$name" ;;
    esac
  done
  docker save -o "$folder/images.tar" "${images[@]}"
  docker rm -f kdist-node-build >/dev/null 2>&1 || true
  docker run -d --name kdist-node-build --privileged --security-opt seccomp=unconfined --tmpfs /run -v "$folder:/build" \
    --entrypoint sleep "$NODE_BASE" infinity >/dev/null
  docker exec -d kdist-node-build containerd
  wait_for 30 containerd docker exec kdist-node-build ctr version
  docker exec kdist-node-build ctr -n k8s.io images import --all-platforms --no-unpack --digests /build/images.tar >/dev/null
  docker exec kdist-node-build pkill containerd
  wait_for 30 "containerd's end" not docker exec kdist-node-build pgrep -x containerd
  docker commit -c 'ENTRYPOINT ["/usr/local/bin/entrypoint","/sbin/init"]' kdist-node-build "$NODE_IMAGE" >/dev/null
  docker rm -f kdist-node-build >/dev/null
  docker image rm -f "${images[@]}" >/dev/null
  rm -rf "$folder"
}
