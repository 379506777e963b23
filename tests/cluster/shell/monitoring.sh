#!/usr/bin/env bash
# What tests of the chart need to see trainings: the kinds of the Prometheus operator, and Debian's Prometheus as an image.
set -euo pipefail

OPERATOR_VERSION=v0.93.0

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
  go mod download "github.com/prometheus-operator/prometheus-operator@$OPERATOR_VERSION"
  folder=$(go env GOMODCACHE)/github.com/prometheus-operator/prometheus-operator@$OPERATOR_VERSION/example/prometheus-operator-crd
  for kind in podmonitors prometheusrules; do
    kubectl apply --server-side -f "$folder/monitoring.coreos.com_$kind.yaml" >/dev/null
  done
  kubectl wait --for=condition=Established --timeout=60s crd/podmonitors.monitoring.coreos.com crd/prometheusrules.monitoring.coreos.com >/dev/null
}
