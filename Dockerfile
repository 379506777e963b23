# The image that every pod of a job runs: the agent, the training loop, torch. docker and buildah build it alike:
#   docker build -t kdist-trainer .
# and, as a target of its own, the small one of the controller, without torch:
#   docker build --target controller -t kdist-controller .
# For machines without GPUs, with wheels of torch from an index that has such: --build-arg TORCH_INDEX=https://…
# The base by its whole version; a tag may move, so whoever publishes images adds the digest that their registry shows:
#   --build-arg BASE=python:3.12.12-slim-bookworm@sha256:…
ARG BASE=python:3.12.12-slim-bookworm

# Its files change with every commit, what they need hardly ever.
FROM ${BASE} AS trainer
COPY trainer/kdist_trainer /opt/kdist/trainer/kdist_trainer
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/kdist/trainer

FROM ${BASE} AS controller-files
COPY cli/kdist /opt/kdist/controller/kdist
COPY controller/kdist_controller /opt/kdist/controller/kdist_controller
COPY trainer/kdist_trainer /opt/kdist/controller/kdist_trainer
# Links in the repository; the controller needs no dashboards and no code of `kdist init`.
RUN cd /opt/kdist/controller/kdist && rm -rf manifests dashboards scaffolds
COPY manifests /opt/kdist/controller/kdist/manifests
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/kdist/controller

FROM ${BASE} AS controller
RUN python3 -m venv /opt/kdist && /opt/kdist/bin/python -c 'import sysconfig; print("/opt/kdist/controller", \
    file=open(sysconfig.get_path("purelib") + "/kdist-controller.pth", "w"))'
COPY controller/requirements.txt /opt/kdist/requirements.txt
RUN /opt/kdist/bin/pip install --no-cache-dir --no-deps --require-hashes -r /opt/kdist/requirements.txt
COPY --from=controller-files /opt/kdist/controller /opt/kdist/controller
ENV PATH=/opt/kdist/bin:$PATH HOME=/tmp USER=kdist PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 9402
# It starts no processes, so it needs no init above it.
ENTRYPOINT ["/opt/kdist/bin/python", "-m", "kdist_controller"]
LABEL org.opencontainers.image.title="kdist-controller" \
    org.opencontainers.image.description="The controller of kdist's TrainingJob resources" \
    org.opencontainers.image.licenses="Apache-2.0"
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"

FROM ${BASE}
# An index of other wheels of torch: its version is the lock's, its hash is not.
ARG TORCH_INDEX=
# Packages of the lock to leave out, as a regular expression for awk.
ARG WITHOUT=^$
# Debian 12's; what a rebuild without a change of the source appends, such as +b3, differs by architecture.
ARG TINI=0.19.0-1*
RUN command -v tini >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends "tini=${TINI}" && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/kdist && /opt/kdist/bin/python -c 'import sysconfig; print("/opt/kdist/trainer", \
    file=open(sysconfig.get_path("purelib") + "/kdist-trainer.pth", "w"))'
COPY trainer/requirements.txt /opt/kdist/requirements.txt
# torch and what only torch needs: by far the largest layer, and the one that changes least.
RUN awk -v without="$WITHOUT" -v other="$TORCH_INDEX" \
    '/^[a-z]/ {keep = /^(torch|triton|nvidia-|cuda-)/ && $1 !~ without && !other} keep' /opt/kdist/requirements.txt >/tmp/torch.txt \
    && if [ -n "$TORCH_INDEX" ]; then /opt/kdist/bin/pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" \
    "$(awk '/^torch==/ {print $1}' /opt/kdist/requirements.txt)"; \
    else /opt/kdist/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/torch.txt; fi \
    && rm /tmp/torch.txt
RUN awk -v without="$WITHOUT" '/^[a-z]/ {keep = !/^(torch|triton|nvidia-|cuda-)/ && $1 !~ without} keep' \
    /opt/kdist/requirements.txt >/tmp/rest.txt \
    && /opt/kdist/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/rest.txt && rm /tmp/rest.txt
COPY --from=trainer /opt/kdist/trainer /opt/kdist/trainer

# The root may be read-only and the user any number: nothing is written but in /tmp, and nobody is looked up by number.
ENV PATH=/opt/kdist/bin:$PATH HOME=/tmp USER=kdist PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 9401
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/kdist/bin/python", "-m", "kdist_trainer"]
LABEL org.opencontainers.image.title="kdist-trainer" \
    org.opencontainers.image.description="What every pod of a kdist job runs: the elastic agent, the training loop and its exporter" \
    org.opencontainers.image.licenses="Apache-2.0"
# The versions of this build, last so that they do not touch the layers above.
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
