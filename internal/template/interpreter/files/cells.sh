# Runs the files that it is told on its standard input, one a line, in this one
# shell, and tells on the descriptor $1 how each ended.
__warren_fd=$1
shift
trap 'return 130' INT
while IFS= read -r __warren_cell; do
	source "$__warren_cell" </dev/null
	echo "{\"status\":$?}" >&"$__warren_fd"
done
