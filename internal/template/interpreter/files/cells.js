// Runs the code that it is told on its standard input, one JSON string a line,
// in one REPL, and tells on the descriptor argv[2] how each ended.
'use strict';
const fs = require('fs');
const repl = require('repl');
const util = require('util');
const { PassThrough } = require('stream');
const readline = require('readline');

const control = Number(process.argv[2]);
const r = repl.start({
  prompt: '', input: new PassThrough(), output: new PassThrough().resume(),
  terminal: false, useGlobal: true, breakEvalOnSigint: true,
});
let pending = null;

function tell(answer) {
  if (!pending) return;
  pending = null;
  fs.writeSync(control, JSON.stringify(answer) + '\n');
}

function failure(e) {
  if (e instanceof Error || (e && e.stack)) return { error: [e.name || 'Error', String(e.message), String(e.stack).split('\n')] };
  return { error: ['Error', util.inspect(e), [util.inspect(e)]] };
}

function bundle(v) {
  if (v === undefined) return {};
  const show = v !== null && typeof v === 'object' && v[Symbol.for('Jupyter.display')];
  if (typeof show === 'function') return { data: show.call(v) };
  const data = { 'text/plain': util.inspect(v) };
  if (v !== null && typeof v === 'object') {
    try {
      const s = JSON.stringify(v);
      if (s !== undefined) data['application/json'] = JSON.parse(s);
    } catch { /* circular: the text is all there is */ }
  }
  return { data };
}

// A REPL knows no static imports: they are made dynamic ones.
const imports = /^[ \t]*import\s+(?:([\w$]+)\s*(?:,\s*)?)?(?:\{([^}]*)\}|\*\s*as\s+([\w$]+))?(\s*from\s*)?(["'][^"'\n]+["'])[ \t]*;?[ \t]*$/gm;

function dynamic(code) {
  return code.replace(imports, (all, name, some, whole, from, module) => {
    if (!from) return name || some || whole ? all : `await import(${module});`;
    const names = (some || '').split(',').map((s) => s.trim()).filter(Boolean).map((s) => s.replace(/\s+as\s+/, ': '));
    if (name) names.unshift(`default: ${name}`);
    if (!whole) return `const { ${names.join(', ')} } = await import(${module});`;
    return `const ${whole} = await import(${module});` + (name ? ` const ${name} = ${whole}.default;` : '');
  });
}

process.on('SIGINT', () => tell({ error: ['Interrupted', 'the execution was interrupted', []] }));
process.on('uncaughtException', (e) => (pending ? tell(failure(e)) : console.error(e)));
process.on('unhandledRejection', (e) => (pending ? tell(failure(e)) : console.error(e)));

readline.createInterface({ input: process.stdin }).on('line', (line) => {
  const mine = pending = {};
  r.eval(dynamic(JSON.parse(line)) + '\n', r.context, 'cell', (e, v) => {
    if (pending !== mine) return;
    if (e) return tell(failure(e instanceof repl.Recoverable ? e.err : e));
    Promise.resolve(v).then((x) => pending === mine && tell(bundle(x)), (x) => pending === mine && tell(failure(x)));
  });
}).on('close', () => process.exit(0));
