// Makes Node's random numbers differ between the forks of a sandbox.
//
// A fork has the memory of its source. Node takes random bytes from OpenSSL's
// generator, whose state is in that memory and which seeds itself anew only
// after an hour, and it keeps random numbers for randomUUID and randomInt in
// store. So here the functions of the crypto module take them from the kernel,
// each time. Math.random is replaced when the sandbox was restored, which the
// agent tells by SIGURG, and then too OpenSSL is told to seed anew what it makes
// keys and TLS from: by reseed.node beside this file, which a template has that
// has a compiler. Without it they come from the processor, where Node has
// OpenSSL's RDRAND engine.
// WARREN_RESEED=0 in the environment turns it off.
'use strict';
if (process.env.WARREN_RESEED !== '0' && process.platform === 'linux') {
  const fs = require('fs');
  const crypto = require('crypto');
  let fd = -1;

  function fill(view) { // a Uint8Array
    if (fd < 0) fd = fs.openSync('/dev/urandom', 'r');
    for (let n = 0; n < view.length;) n += fs.readSync(fd, view, n, view.length - n, null);
    return view;
  }

  const { randomBytes, randomFillSync, randomFill, randomInt, randomUUID } = crypto;
  // Arguments that are wrong are the originals' to refuse.
  const count = (n) => Number.isInteger(n) && n >= 0 && n <= 0x7fffffff;
  const bytes = (b) => ArrayBuffer.isView(b) ? new Uint8Array(b.buffer, b.byteOffset, b.byteLength)
    : b instanceof ArrayBuffer || b instanceof SharedArrayBuffer ? new Uint8Array(b) : null;

  function part(buf, offset, size) {
    const whole = bytes(buf);
    if (!whole) return null;
    const unit = ArrayBuffer.isView(buf) && buf.BYTES_PER_ELEMENT || 1;
    const from = (offset === undefined ? 0 : offset) * unit;
    const length = size === undefined ? whole.length - from : size * unit;
    if (!count(from) || !count(length) || from + length > whole.length) return null;
    return whole.subarray(from, from + length);
  }

  const patched = {
    randomBytes(size, callback) {
      if (!count(size) || callback !== undefined && typeof callback !== 'function') return randomBytes(size, callback);
      const b = fill(Buffer.alloc(size));
      if (callback === undefined) return b;
      setImmediate(callback, null, b);
    },
    randomFillSync(buf, offset, size) {
      const p = part(buf, offset, size);
      if (!p) return randomFillSync(buf, offset, size);
      fill(p);
      return buf;
    },
    randomFill(buf, offset, size, callback) {
      if (typeof offset === 'function') [callback, offset, size] = [offset, undefined, undefined];
      else if (typeof size === 'function') [callback, size] = [size, undefined];
      const p = typeof callback === 'function' && part(buf, offset, size);
      if (!p) return randomFill(buf, offset, size, callback);
      fill(p);
      setImmediate(callback, null, buf);
    },
    randomInt(min, max, callback) {
      if (max === undefined || typeof max === 'function') [min, max, callback] = [0, min, max];
      const range = max - min;
      if (!Number.isSafeInteger(min) || !Number.isSafeInteger(max) || !(range > 0 && range <= 0xffffffffffff) ||
        callback !== undefined && typeof callback !== 'function') return randomInt(min, max, callback);
      const limit = 0x1000000000000 - 0x1000000000000 % range;
      let x;
      do x = fill(Buffer.alloc(6)).readUIntBE(0, 6); while (x >= limit); // all are as likely
      const n = min + x % range;
      if (callback === undefined) return n;
      process.nextTick(callback, null, n);
    },
    randomUUID(options) {
      if (options !== undefined && (options === null || typeof options !== 'object')) return randomUUID(options);
      const b = fill(Buffer.alloc(16));
      b[6] = b[6] & 0x0f | 0x40; // RFC 9562, version 4
      b[8] = b[8] & 0x3f | 0x80;
      return b.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');
    },
  };
  Object.assign(crypto, patched);
  const { promisify } = require('util');
  // The original's promise is of the bytes, as its callback's is.
  crypto.randomFill[promisify.custom] = (...args) => new Promise((resolve, reject) =>
    patched.randomFill(...args, (err, b) => err ? reject(err) : resolve(b)));

  const web = crypto.webcrypto && Object.getPrototypeOf(crypto.webcrypto);
  if (web && web.getRandomValues) {
    const { getRandomValues } = web;
    web.getRandomValues = function (array) {
      // The original checks, and what it wrote is written over.
      getRandomValues.call(this, array);
      fill(bytes(array));
      return array;
    };
    web.randomUUID = function () { return patched.randomUUID(); };
  }
  require('module').syncBuiltinESMExports();

  // One that was built with another OpenSSL, or not at all, is no reason not to
  // run the program.
  let openssl = () => false;
  try {
    openssl = require(require('path').join(__dirname, 'reseed.node'));
  } catch { /* there is none */ }

  const onRestore = () => {
    try {
      if (!openssl()) crypto.setEngine('rdrand', crypto.constants.ENGINE_METHOD_RAND);
    } catch { /* this Node has none */ }
    // sfc32, seeded from the kernel. Math.random promises no more.
    let [a, b, c, d] = new Uint32Array(fill(new Uint8Array(16)).buffer);
    Math.random = function random() {
      const word = () => {
        const t = (a + b + d) | 0;
        d = d + 1 | 0;
        a = b ^ b >>> 9;
        b = c + (c << 3) | 0;
        c = (c << 21 | c >>> 11) + t | 0;
        return t >>> 0;
      };
      return ((word() >>> 5) * 0x4000000 + (word() >>> 6)) / 0x20000000000000;
    };
  };
  // Workers have no signals of their own: there Math.random stays as it was.
  if (require('worker_threads').isMainThread) process.on('SIGURG', onRestore);
}
