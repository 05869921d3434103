need npm node
mkdir lib app
echo '{"name":"warren-prove-lib","version":"1.0.0","main":"i.js"}' >lib/package.json
echo 'module.exports = 6 * 7' >lib/i.js
echo '{"name":"app","version":"1.0.0"}' >app/package.json
export npm_config_cache=$PWD/cache npm_config_update_notifier=false npm_config_audit=false npm_config_fund=false
unset NPM_CONFIG_PREFIX || true
(cd lib && npm pack --silent >/dev/null)
cd app
npm install --offline --silent ../lib/warren-prove-lib-1.0.0.tgz
[ "$(node -p "require('warren-prove-lib')")" = 42 ]
echo "npm $(npm --version) packed and installed a package, offline"
