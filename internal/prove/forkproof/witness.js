// A Node.js process that lives through a capture; it answers at node.sock.
const crypto = require('crypto'), fs = require('fs'), net = require('net');
crypto.randomBytes(1); crypto.randomUUID(); Math.random(); // each has its seed before the capture
const s = net.createServer(c => c.end(
	'crypto ' + crypto.randomBytes(16).toString('hex') + '\nuuid ' + crypto.randomUUID() + '\nmath ' + Math.random() + '\n'));
s.listen('node.tmp', () => fs.renameSync('node.tmp', 'node.sock'));
