#!/usr/bin/env bash
# The real operators: their own manifests, from their own modules, and their programs built from the same source.
set -euo pipefail

operator_program() { # operator_program NAME: prints what its program is called
  case $1 in
    trainer) echo trainer-controller-manager ;;
    jobset | kueue | training-operator) echo "$1" ;;
    *) fail "no operator $1: there are ${OPERATORS[*]}" ;;
  esac
}

operator() {
  local name=$1 binary module manifests overlay folder image
  binary=$(operator_program "$name")
  case $name in
    jobset) module=sigs.k8s.io/jobset manifests=config overlay=default ;;
    kueue) module=sigs.k8s.io/kueue manifests=config overlay=default ;;
    training-operator) module=github.com/kubeflow/training-operator manifests=manifests overlay=overlays/standalone ;;
    trainer) module=github.com/kubeflow/trainer/v2 manifests=manifests overlay=overlays/manager ;;
  esac
  program "$binary"
  folder=$(mktemp -d -p "$CACHE")
  cp -r --no-preserve=mode "$(module_folder "$module")/$manifests/." "$folder"
  sed -i '/third-party\/jobset/d' "$folder/$overlay/kustomization.yaml" # trainer's would fetch JobSet, which is here by its own name
  [[ $name != trainer ]] || # alpha: takes progress from pods
    printf 'featureGates:\n  TrainJobStatus: true\n' >>"$folder/base/manager/controller_manager_config.yaml"
  kubectl kustomize "$folder/$overlay" >"$folder/all.yaml" 2>/dev/null
  image=$(sed -n 's/^        image: //p' "$folder/all.yaml" | head -1)
  if kubectl get deployments -A -o jsonpath='{.items[*].spec.template.spec.containers[*].image}' | grep -qw -- "$image"; then
    rm -rf "$folder"
    return
  fi
  say "installing $name"
  binary_image "$REGISTRY/${image#*/}" "$BIN/$binary" /manager scratch 65532
  push "$REGISTRY/${image#*/}"
  kubectl apply --server-side --force-conflicts -f "$folder/all.yaml" >/dev/null
  rm -rf "$folder"
}

operators_ready() { # a webhook that does not answer yet refuses every job of its kind
  local namespace name
  while read -r namespace name; do
    kubectl -n "$namespace" rollout status "deployment/$name" --timeout=300s >/dev/null || not_ready "$namespace" "$name"
  done < <(kubectl get deployments -A -o custom-columns=S:.metadata.namespace,N:.metadata.name --no-headers | grep -v '^e2e-')
}
not_ready() { # not_ready NAMESPACE DEPLOYMENT
  kubectl get nodes >&2
  kubectl -n "$1" get pods -o wide >&2
  kubectl -n "$1" get events --sort-by=.lastTimestamp | tail -20 >&2
  fail "deployment $2 in namespace $1 is not ready after 300 s"
}
