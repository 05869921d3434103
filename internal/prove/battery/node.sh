need node
cat >a.js <<'J'
const http = require('http'), crypto = require('crypto'), { Worker } = require('worker_threads');
const s = http.createServer((q, r) => r.end(crypto.createHash('sha256').update('x').digest('hex')));
s.listen(0, '127.0.0.1', () => http.get({ port: s.address().port, host: '127.0.0.1' }, r => {
	let d = ''; r.on('data', c => d += c); r.on('end', () => {
		if (!d.startsWith('2d711642')) process.exit(1);
		new Worker("require('worker_threads').parentPort.postMessage(6*7)", { eval: true }).on('message', m => {
			if (m !== 42) process.exit(1);
			s.close(); console.log('node', process.version, 'with an HTTP server and a worker thread');
		});
	});
}));
J
node a.js
