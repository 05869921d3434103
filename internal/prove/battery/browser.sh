b=""
for c in chromium chromium-browser google-chrome headless_shell chrome-headless-shell; do
	b=$(command -v $c 2>/dev/null) && break
done
[ -n "$b" ] || skip "no Chromium is in the template"
echo '<p id=a></p><script>document.getElementById("a").textContent = "answer " + 6*7</script>' >p.html
"$b" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$PWD/d" --dump-dom "file://$PWD/p.html" 2>log | grep -q 'answer 42' || { tail -n 5 log >&2; exit 1; }
"$b" --version 2>/dev/null | head -n 1
