#!/usr/bin/env bash
# What tests of the chart need to see trainings: the Prometheus operator and its kinds, and Prometheus as an image.
set -euo pipefail

monitoring_version() { awk -v module="$1" '$1 == module {print $2}' "$HERE/programs/monitoring/go.mod"; }

# The operator, and a Prometheus that finds pods by itself, which Debian's does not. Prints NAME VALUE lines.
monitoring() {
  local operator=github.com/prometheus-operator/prometheus-operator prometheus=github.com/prometheus/prometheus flags version name
  flags=$(go env GOFLAGS)
  export GOFLAGS="$flags -tags=remove_all_sd,enable_kubernetes_sd" # of all that finds targets, Kubernetes alone
  program prometheus-operator prometheus-config-reloader prometheus-kubernetes
  for name in prometheus-operator prometheus-config-reloader; do
    monitoring_image "$name" "$(monitoring_version $operator)" "/bin/$name"
  done
  version=$(monitoring_version $prometheus | sed -E 's/^v0\.(.)0?/v\1./') # the module's v0.313.1 is the program's v3.13.1
  monitoring_image prometheus-kubernetes "$version" /bin/prometheus
  echo "version $version"
  echo "manifests $(module_folder $operator monitoring)/example"
}

monitoring_image() { # monitoring_image NAME VERSION PATH-IN-IMAGE
  local image=$REGISTRY/$1:$2
  if ! have_image "$image"; then
    binary_image "$image" "$BIN/$1" "$3" scratch 65532
    push "$image" >&2
  fi
  echo "$1 $image"
}

prometheus_image() { # prints its name
  local image
  command -v prometheus >/dev/null || fail "there is no prometheus: on Debian \`make system\` installs it"
  image=$REGISTRY/prometheus:$(prometheus --version 2>&1 | awk 'NR == 1 {sub(/[^0-9.].*/, "", $3); print $3}')
  if ! have_image "$image"; then
    python_base
    binary_image "$image" "$(command -v prometheus)" /usr/bin/prometheus "$PYTHON_BASE" 65532
    push "$image"
  fi
  echo "$image"
}

monitoring_kinds() { # the kinds alone: no operator is there to act on them, and the tests do what it would
  local kind folder
  kubectl get crd podmonitors.monitoring.coreos.com prometheusrules.monitoring.coreos.com >/dev/null 2>&1 && return
  folder=$(module_folder github.com/prometheus-operator/prometheus-operator monitoring)/example/prometheus-operator-crd
  for kind in podmonitors prometheusrules; do
    kubectl apply --server-side -f "$folder/monitoring.coreos.com_$kind.yaml" >/dev/null
  done
  kubectl wait --for=condition=Established --timeout=60s crd/podmonitors.monitoring.coreos.com crd/prometheusrules.monitoring.coreos.com >/dev/null
}
