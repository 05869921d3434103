#!/usr/bin/env bash
# The main job, once: a program that an agent could have written runs in a
# gVisor sandbox over a CSV file and leaves a chart, which is fetched back.
#
# WARREN_STATE and WARREN_SOCKET choose another state directory and socket than
# the defaults of `warren serve`. A daemon that runs there already is used and
# left running; else one is started and stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

state=${WARREN_STATE:-/var/lib/warren}
socket=${WARREN_SOCKET:-/run/warren/warren.sock}
export WARREN_HOST="unix://$socket"
warren=bin/warren
daemon="" id=""

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

if [ "$(id -u)" -ne 0 ]; then
	echo "The demo needs root, as sandboxes are made of namespaces, cgroups and mounts: sudo make demo" >&2
	exit 1
fi

cleanup() {
	[ -z "$id" ] || $warren rm "$id" >/dev/null || true
	if [ -n "$daemon" ]; then
		kill "$daemon" 2>/dev/null && wait "$daemon" || true
	fi
}
trap cleanup EXIT

if ! $warren ls >/dev/null 2>&1; then
	say "Starting a daemon (state in $state)"
	mkdir -p "$state"
	log="$state/demo-daemon.log"
	# The demo needs no TCP address, so it cannot collide with one.
	$warren serve --state "$state" --socket "$socket" --listen none >"$log" 2>&1 &
	daemon=$!
	for _ in $(seq 100); do
		$warren ls >/dev/null 2>&1 && break
		kill -0 "$daemon" 2>/dev/null || { cat "$log" >&2; exit 1; }
		sleep 0.1
	done
fi
$warren runtimes

if ! $warren template inspect base >/dev/null 2>&1; then
	say "Building the default template, a Debian with Python, Node.js and a compiler (this once)"
	$warren template build --base
fi

say "An agent's program, in a sandbox"
set -x
id=$($warren create --net none --timeout 10m)
$warren cp demo/seattle-weather.csv "$id:/home/user/weather.csv"
$warren cp demo/analyse.py "$id:/home/user/analyse.py"
$warren exec "$id" -- uname -a
$warren exec "$id" -- python3 analyse.py weather.csv chart.png
mkdir -p demo-output
$warren cp "$id:/home/user/chart.png" demo-output/chart.png
{ set +x; } 2>/dev/null

kind=$(head -c 8 demo-output/chart.png | od -An -tx1 | tr -d ' \n')
[ "$kind" = 89504e470d0a1a0a ] || { echo "demo-output/chart.png is not a PNG" >&2; exit 1; }

say "The chart is in $PWD/demo-output/chart.png ($(wc -c <demo-output/chart.png) bytes)."
cat <<EOF
What you would type next:

  bin/warren serve &
  bin/warren run -- python3 -c 'import platform; print(platform.platform())'
  bin/warren run -it -- bash
EOF
