# Installs what a piece of work needs and the template has not: $1 is a command of
# it, the rest are Debian packages. It ends with 0 where the command is there then.
cmd=$1
shift
if command -v "$cmd" >/dev/null 2>&1; then
	echo "in the template"
	exit 0
fi
command -v apt-get >/dev/null 2>&1 || skip "$cmd is not in the template, which has no apt-get to install it with"
export DEBIAN_FRONTEND=noninteractive
said=/run/warren-prove-apt # what became of the update: it is tried once
if [ ! -e $said ]; then
	timeout 90 apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=8 -o Acquire::https::Timeout=8 update >log 2>&1 || true
	if grep -qE '^(Err|W:|E:)' log; then
		grep -E '^(Err|W:|E:)' log | head -n 1 >$said
	elif ! grep -qE '^(Hit|Get)' log; then
		echo "no archive is configured" >$said
	else
		: >$said
	fi
fi
[ ! -s $said ] || skip "$cmd is not in the template, and no package archive answers from inside: $(cat $said)"
apt-get install -y --no-install-recommends "$@" >log 2>&1 || { tail -n 5 log >&2; skip "$cmd is not in the template, and apt-get cannot install $*: $(grep '^E:' log | head -n 1)"; }
rm -f /var/cache/apt/archives/*.deb
command -v "$cmd" >/dev/null 2>&1 || skip "$cmd is not in the template, nor in $*"
echo "installed from Debian"
