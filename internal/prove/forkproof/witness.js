// A Node.js process that lives through a capture; it answers at node.sock.
const crypto = require('crypto'), fs = require('fs'), net = require('net');
const key = () => crypto.generateKeyPairSync('ed25519').publicKey.export({ format: 'der', type: 'spki' }).toString('hex');
crypto.randomBytes(1); crypto.randomUUID(); Math.random(); key(); // each has its seed before the capture
const s = net.createServer(c => c.end(
	'crypto ' + crypto.randomBytes(16).toString('hex') + '\nuuid ' + crypto.randomUUID() + '\nmath ' + Math.random() + '\nkey ' + key() + '\n'));
s.listen('node.tmp', () => fs.renameSync('node.tmp', 'node.sock'));
