need python3
s=""
for c in clangd gopls rust-analyzer "pyright-langserver --stdio" "typescript-language-server --stdio" pylsp jedi-language-server; do
	command -v "${c%% *}" >/dev/null 2>&1 && { s=$c; break; }
done
[ -n "$s" ] || skip "no language server is in the template (clangd, gopls, rust-analyzer, pyright, typescript, pylsp)"
SERVER=$s python3 - <<'P'
import json, os, subprocess
p = subprocess.Popen(os.environ["SERVER"].split(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
def send(m):
    b = json.dumps({"jsonrpc": "2.0", **m}).encode()
    p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b); p.stdin.flush()
def read():
    n = 0
    while (l := p.stdout.readline().strip()):
        if l.lower().startswith(b"content-length:"): n = int(l.split(b":")[1])
    return json.loads(p.stdout.read(n))
send({"id": 1, "method": "initialize", "params": {"processId": os.getpid(), "rootUri": "file://" + os.getcwd(), "capabilities": {}}})
while (m := read()).get("id") != 1: pass
assert "capabilities" in m["result"]
p.kill()
print(os.environ["SERVER"].split()[0], "answered initialize")
P
