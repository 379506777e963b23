#!/usr/bin/env bash
# Installs the programs that tests meet besides Python: as root on Debian by apt-get, elsewhere it names what is missing.
# Nothing to do, and nothing said, once all are there.
set -euo pipefail

# program=Debian package
wanted=(git=git shellcheck=shellcheck)
if [[ $(uname -s) == Linux ]]; then
  wanted+=(strace=strace promtool=prometheus chromium=chromium)
fi

missing=()
for pair in "${wanted[@]}"; do
  command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
done
((${#missing[@]})) || exit 0

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]} (names of Debian's packages). Tests that need them are skipped and say so." >&2
  exit 0
fi

# A package that brings a service must not start it: its port may be taken, and tests start their own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi

echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
