#!/usr/bin/env bash
# Installs the Debian packages that Warren needs, asking apt only for what is
# missing. Elsewhere than on Debian it lists what to install by hand.
#
# usage: setup.sh run|test
set -euo pipefail

# The command that a package is known by, and the package that brings it.
run="crun:crun lxcfs:lxcfs mmdebstrap:mmdebstrap nft:nftables ip:iproute2"
test="$run node:nodejs npm:npm python3:python3 pip3:python3-pip runc:runc mkfs.xfs:xfsprogs busybox:busybox-static gcc:gcc git:git curl:curl"

case "${1:-}" in
run) wanted=$run; files="" ;;
test) wanted=$test; files="/usr/include/stdio.h:libc6-dev" ;;
*) echo "usage: $0 run|test" >&2; exit 2 ;;
esac

missing=()
for pair in $wanted; do
	PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
for pair in $files; do
	[ -e "${pair%%:*}" ] || missing+=("${pair#*:}")
done
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
	echo "setup: install these with this system's package manager, then run again: ${missing[*]}" >&2
	exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
	echo "setup: needs root to install: apt-get install ${missing[*]}" >&2
	exit 1
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# A host that has never run lxcfs as a service does not need to: the daemon
# starts one of its own.
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
