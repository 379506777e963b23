#!/usr/bin/env bash
# The image that every pod of a job runs, and the controller's, from this tree, on every node.
set -euo pipefail

export IMAGE=$REGISTRY/kdist-trainer:dev CONTROLLER=$REGISTRY/kdist-controller:dev
# No test has a GPU: CUDA's large libraries stay out, and the base holds empty ones of the same names and functions,
# as empty_cuda.py makes them for the lock's torch.
PYTHON_BASE=localhost/python-base:bookworm-$(cat "$HERE/empty_cuda.py" <(grep '^torch==' "$HERE/../../trainer/requirements.txt") | sha256sum | head -c 12)
WITHOUT='^(nvidia-(cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl|nvjitlink|nvshmem|nvtx|cuda-nvrtc)|cuda-bindings|triton)'

python_base() { # Debian with Python, standing in for python:slim where that cannot be pulled
  have_image "$PYTHON_BASE" && return
  packages "making the trainer's base image" debootstrap gcc binutils
  say "making the base of the trainer's image"
  local root torch
  torch=$("$HERE/../../.venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
  root=$(mktemp -d -p "$CACHE")
  chmod 755 "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,tini bookworm "$root" >/dev/null
  python3 "$HERE/empty_cuda.py" "$torch" "$root/usr/lib/x86_64-linux-gnu"
  chroot "$root" ldconfig
  import "$root" "$PYTHON_BASE" -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    -c 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt'
}

build_image() { # build_image IMAGE OPTION...
  local image=$1
  shift
  DOCKER_BUILDKIT=0 docker build -q -t "$image" --build-arg "BASE=$PYTHON_BASE" "$@" \
    "$HERE/../.." >/dev/null 2>"$CACHE/image.log" || fail "$(tail -30 "$CACHE/image.log")"
  push "$image"
}
image() { # image [TAG]
  local node pull pulls=() image=${IMAGE%:*}:${1:-dev} controller=${CONTROLLER%:*}:${1:-dev}
  room 8
  python_base
  say "building the images of controller and trainer"
  build_image "$controller" --target controller
  build_image "$image" --build-arg "WITHOUT=$WITHOUT"
  for node in $(nodes | grep -v control-plane); do # under the same name, so that every pod gets the new one
    for pull in "$image" "$controller"; do
      docker exec "$node" crictl pull "$pull" >/dev/null &
      pulls+=($!)
    done
  done
  for pull in "${pulls[@]}"; do wait "$pull"; done # by name: an engine that we started is a child that never ends
  docker image prune -f >/dev/null
}

stock() { # stock [IMAGE]: an image as PyTorch's own one is laid out, Python and torch, root's and without kdist; prints its name
  local image=${1:-$IMAGE} node
  DOCKER_BUILDKIT=0 docker build -q -t "$image-stock" - >/dev/null <<EOF
FROM $image AS trainer
FROM $PYTHON_BASE
COPY --from=trainer /opt/kdist /opt/conda
RUN rm -rf /opt/conda/trainer /opt/conda/lib/python3*/site-packages/kdist-trainer.pth && cd /opt/conda/bin \
 && sed -i 's#/opt/kdist#/opt/conda#' \$(grep -rIl '^#!/opt/kdist' .) ../pyvenv.cfg \
 && ./python -m pip uninstall -qy msgspec pydantic pydantic-core prometheus-client regex xxhash obstore safetensors tensorboard
ENV PATH=/opt/conda/bin:\$PATH
EOF
  push "$image-stock"
  for node in $(nodes | grep -v control-plane); do docker exec "$node" crictl pull "$image-stock" >/dev/null; done
  echo "$image-stock"
}

compiler() { # compiler [IMAGE]: the trainer's image with a C++ compiler, which torch.compile needs; prints its name
  local image=${1:-$IMAGE} tools=localhost/compiler:bookworm root node
  if ! have_image "$tools"; then
    packages "making an image with a compiler" debootstrap
    say "making the image with a compiler"
    root=$(mktemp -d -p "$CACHE")
    debootstrap --variant=minbase --include=g++,libpython3-dev,ca-certificates bookworm "$root" >/dev/null
    import "$root" "$tools"
  fi
  printf 'FROM %s AS tools\nFROM %s\nUSER 0\nCOPY --from=tools /usr /usr\nUSER 65532\n' "$tools" "$image" |
    DOCKER_BUILDKIT=0 docker build -q -t "$image-compiler" - >/dev/null
  push "$image-compiler"
  for node in $(nodes | grep -v control-plane); do docker exec "$node" crictl pull "$image-compiler" >/dev/null; done
  echo "$image-compiler"
}
