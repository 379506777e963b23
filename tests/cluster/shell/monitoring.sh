#!/usr/bin/env bash
# Debian's Prometheus as an image, for tests that watch pods from inside the cluster.
set -euo pipefail

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
