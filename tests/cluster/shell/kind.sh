#!/usr/bin/env bash
# The cluster itself: nodes, their network, the registry they pull from, the volumes they share.
set -euo pipefail

SHARED=/var/lib/kdist-shared # one folder of this machine, at /shared on every node
VOLUMES=100

up() { # up [WORKERS]
  local node
  client_programs
  engine
  node_image
  registry
  if kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    if answers && all_ready; then
      remove_leftovers
      return
    fi
    say "removing a cluster that does not answer, or one of whose nodes does not"
    kind delete cluster -q --name "$CLUSTER" --kubeconfig "$KUBECONFIG"
  fi
  say "starting a cluster"
  mkdir -p "$SHARED"
  configuration "${1:-2}" >"$CACHE/kind.yaml"
  kind create cluster -q --name "$CLUSTER" --image "$CHOSEN" --config "$CACHE/kind.yaml" --kubeconfig "$KUBECONFIG" 9>&-
  docker network connect kind kdist-registry 2>/dev/null || true
  for node in $(nodes); do mirror "$node"; done
  network
  kubectl delete storageclass standard >/dev/null 2>&1 || true
  volumes
  kubectl wait --for=condition=Ready nodes --all --timeout=120s >/dev/null
  kubectl -n kube-system rollout status deployment/coredns --timeout=120s >/dev/null
  say "up: eval \"\$($0 env)\""
}

answers() { kubectl get --raw /readyz --request-timeout 5s >/dev/null 2>&1; }
all_ready() { kubectl wait --for=condition=Ready nodes --all --timeout=60s >/dev/null 2>&1; }

remove_leftovers() { # what tests that were killed have left
  local names
  kubectl uncordon -l kubernetes.io/hostname >/dev/null
  kubectl delete crd trainingjobs.kdist.dev --ignore-not-found >/dev/null # with it, `kdist apply` would send TrainingJobs
  kubectl api-resources >/dev/null # kubectl keeps the kinds that it has seen for hours
  names=$(kubectl get namespaces -o name | grep '^namespace/e2e-') || return 0
  xargs kubectl delete --wait=false >/dev/null <<<"$names"
}
nodes() { kind get nodes --name "$CLUSTER" 2>/dev/null; }

configuration() { # configuration WORKERS
  local mount="extraMounts: [{hostPath: $SHARED, containerPath: /shared}]" worker
  cat "$HERE/kind.yaml"
  [[ $CHOSEN == kindest/* ]] || echo "networking: {disableDefaultCNI: true}"
  echo "nodes:"
  echo "- {role: control-plane, $mount}"
  for ((worker = 0; worker < $1; worker++)); do echo "- {role: worker, $mount}"; done
}

# kind's own network plugin is an image too: where it cannot be pulled, a bridge on each node and a route to each other node.
# A route from this machine, where it may make one, lets pods reach what tests serve at its end of the nodes' network.
network() {
  local table me cidr mine other range address
  [[ ${CHOSEN:-$NODE_IMAGE} == kindest/* ]] && return
  table=$(kubectl get nodes -o custom-columns=N:.metadata.name,C:.spec.podCIDR,I:.status.addresses[0].address --no-headers)
  while read -r me cidr mine; do
    ip route replace "$cidr" via "$mine" 2>/dev/null || true
    move_pods "$me" "${cidr%.*}."
    docker exec -i "$me" tee /etc/cni/net.d/10-bridge.conflist >/dev/null <<J
{"cniVersion": "1.0.0", "name": "kdist", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "$cidr"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
J
    while read -r other range address; do
      [[ $other == "$me" ]] || docker exec "$me" ip route replace "$range" via "$address" </dev/null
    done <<<"$table"
  done <<<"$table"
}

# A node that was deleted and came back has another range of addresses than its bridge, and than pods that outlived that.
move_pods() { # move_pods NODE PREFIX
  local namespace name host address
  docker exec "$1" ip -o -4 address show cni0 </dev/null 2>/dev/null | grep -vqF " $2" || return 0
  docker exec "$1" ip link delete cni0 </dev/null
  while read -r namespace name host address; do
    [[ $host == true || $address == "<none>" || $address == "$2"* ]] ||
      kubectl -n "$namespace" delete pod "$name" --wait=false --grace-period=1 </dev/null >/dev/null
  done < <(kubectl get pods -A --field-selector "spec.nodeName=$1" --no-headers \
    -o custom-columns=S:.metadata.namespace,N:.metadata.name,H:.spec.hostNetwork,I:.status.podIP)
}

registry() { # for the nodes it answers for every registry's name
  if docker container inspect kdist-registry >/dev/null 2>&1; then
    docker start kdist-registry >/dev/null
    return
  fi
  binary_image kdist-registry:local "$BIN/registry" /registry
  printf '%s\n' 'version: 0.1' 'log: {level: warn, accesslog: {disabled: true}}' \
    'storage: {filesystem: {rootdirectory: /var/lib/registry}, delete: {enabled: true}}' 'http: {addr: ":5000"}' >"$CACHE/registry.yml"
  docker run -d --restart=always --name kdist-registry -e OTEL_TRACES_EXPORTER=none -p 127.0.0.1:5000:5000 \
    -v "$CACHE/registry.yml:/config.yml" -v kdist-registry:/var/lib/registry kdist-registry:local serve /config.yml >/dev/null
}
mirror() { # mirror NODE
  docker exec "$1" mkdir -p /etc/containerd/certs.d/_default
  printf '[host."http://kdist-registry:5000"]\n  capabilities = ["pull", "resolve"]\n' |
    docker exec -i "$1" tee /etc/containerd/certs.d/_default/hosts.toml >/dev/null
}
push() {
  wait_for 30 "the registry" bash -c ": </dev/tcp/${REGISTRY/://}"
  docker push -q "$1" >/dev/null
}

# A class "shared" of volumes that many nodes write and any user may write. Kubernetes frees none of them by itself.
volumes() {
  local name phase number present=""
  while read -r name phase; do
    if [[ $phase == Released || $phase == Failed ]]; then
      kubectl delete pv "$name" >/dev/null
      rm -rf "${SHARED:?}/$name"
    else
      present+=" $name "
    fi
  done < <(kubectl get pv -o custom-columns=N:.metadata.name,P:.status.phase --no-headers 2>/dev/null)
  {
    echo '{apiVersion: storage.k8s.io/v1, kind: StorageClass, provisioner: kubernetes.io/no-provisioner,'
    echo ' metadata: {name: shared, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}}'
    for ((number = 1; number <= VOLUMES; number++)); do
      name=shared-$number
      [[ $present != *" $name "* ]] || continue
      install -d -m 0777 "$SHARED/$name"
      printf '%s\n' --- "{apiVersion: v1, kind: PersistentVolume, metadata: {name: $name}, spec: {capacity: {storage: 20Gi}," \
        " accessModes: [ReadWriteMany, ReadWriteOnce], persistentVolumeReclaimPolicy: Retain, storageClassName: shared," \
        " hostPath: {path: /shared/$name}}}"
    done
  } | kubectl apply --server-side -f - >/dev/null
}

lose() { docker kill "$1" >/dev/null; }
registered() { [[ -n $(kubectl get node "$1" -o "jsonpath={.spec.podCIDR}" 2>/dev/null) ]]; }
bring_back() {
  docker start "$1" >/dev/null
  wait_for 60 "$1" docker exec "$1" systemctl is-active containerd
  wait_for 180 "the API server" kubectl get --raw /readyz
  registered "$1" || docker exec "$1" systemctl restart kubelet # which registers its node when it starts
  wait_for 120 "$1 to be registered" registered "$1"
  network # its routes went with it
  kubectl wait --for=condition=Ready nodes --all --timeout=180s >/dev/null
  wait_for 600 "what ran on $1" deployed
}
# A webhook that is away refuses pods, those of other operators among them. Their ReplicaSets then pause, for up to a quarter
# of an hour, but try at once when they are changed.
deployed() {
  kubectl annotate replicasets --all --all-namespaces --overwrite "kdist.dev/tried=$SECONDS" >/dev/null
  kubectl wait --for=condition=Available deployments --all --all-namespaces --timeout=10s >/dev/null 2>&1
}

# A node that nobody reaches and that reaches nobody, while all that is on it runs on.
cut_off() { wire "$1" -I; }
mend() {
  wire "$1" -D
  kubectl wait --for=condition=Ready "node/$1" --timeout=180s >/dev/null
}
wire() { # wire NODE -I|-D
  local chain
  for chain in "INPUT -i" "OUTPUT -o" "FORWARD -i" "FORWARD -o"; do
    # shellcheck disable=SC2086 # a chain and the option that names its interface
    docker exec "$1" iptables "$2" $chain eth0 -j DROP
  done
}

status() {
  docker info >/dev/null 2>&1 || fail "no engine"
  answers || fail "no cluster answers; the engine has: $(docker images --format '{{.Repository}}:{{.Tag}}' | tr '\n' ' ')"
  kubectl get nodes
  kubectl get deployments -A
  docker system df
  df -h "$CACHE"
}

down() {
  docker info >/dev/null 2>&1 || return 0
  client_programs
  kind delete cluster -q --name "$CLUSTER" --kubeconfig "$KUBECONFIG"
  rm -rf "$SHARED"
}
stop() {
  down
  docker rm -f kdist-registry >/dev/null 2>&1 || true
  docker network rm kind >/dev/null 2>&1 || true
  engine_stop
}
purge() {
  stop
  if docker info >/dev/null 2>&1; then # the engine is not ours: at least our images go
    docker volume rm -f kdist-registry >/dev/null
    docker images --format '{{.Repository}}:{{.Tag}}' | grep -E '^(kdist|localhost)[-/:]' | xargs -r docker rmi -f >/dev/null
  fi
  engine_purge
  rm -rf "$CACHE" "$SHARED"
}
