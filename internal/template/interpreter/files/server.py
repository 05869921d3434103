"""The code interpreter's service: runs code in Jupyter kernels over HTTP.

POST /execute answers with one JSON event a line while the code runs.
"""

import argparse
import asyncio
import json
import os
import time
import uuid

from aiohttp import web
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

ALIASES = {
    "py": "python", "python3": "python", "js": "javascript", "node": "javascript", "ts": "typescript", "sh": "bash",
}
# Jupyter's names of the kernels, where they are not the language's.
KERNELS = {"python": "warren-python", "javascript": "warren-javascript", "typescript": "warren-typescript", "bash": "warren-bash", "r": "ir"}
MIMES = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown",
    "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpeg",
    "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "e2b/data": "data", "e2b/chart": "chart",
}
POLL = 0.25  # seconds between looks for a client that left or a kernel that died


def normalise(language):
    name = (language or "python").strip().lower()
    return ALIASES.get(name, name)


def result_event(bundle, main):
    event = {"type": "result", "is_main_result": main}
    extra = {}
    for mime, value in bundle.items():
        if mime == "text/plain" and isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if mime in MIMES:
            event[MIMES[mime]] = value
        else:
            extra[mime] = value
    if extra:
        event["extra"] = extra
    return event


def event_of(msg):
    """The event that a kernel's message on IOPub makes, or None."""
    kind, content = msg["msg_type"], msg["content"]
    if kind == "stream":
        return {"type": content["name"], "text": content["text"], "timestamp": str(msg["header"]["date"])}
    if kind in ("execute_result", "display_data"):
        return result_event(content["data"], kind == "execute_result")
    if kind == "error":
        return {"type": "error", "name": content["ename"], "value": content["evalue"],
                "traceback": "\n".join(content["traceback"])}
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


def quote_bash(s):
    return "'" + s.replace("'", "'\\''") + "'"


def env_code(language, env):
    """Code that sets env for one execution, and code that takes it back."""
    if language == "python":
        return ("__import__('warren_display').push_env(%r)" % env, "__import__('warren_display').pop_env()")
    if language in ("javascript", "typescript"):
        return ("globalThis.__warrenEnv={...process.env};Object.assign(process.env,%s);0" % json.dumps(env),
                "for(const k of %s){if(k in globalThis.__warrenEnv)process.env[k]=globalThis.__warrenEnv[k];else delete process.env[k]};0" % json.dumps(list(env)))
    if language == "bash":
        before, after = [], []
        for k, v in env.items():
            before.append('__warren_had_%s=${%s+x}; __warren_old_%s=${%s-}; export %s=%s' % (k, k, k, k, k, quote_bash(v)))
            after.append('if [ -n "$__warren_had_%s" ]; then export %s="$__warren_old_%s"; else unset %s; fi' % (k, k, k, k))
        return "\n".join(before), "\n".join(after)
    if language == "r":
        sets = ", ".join("%s=%s" % (k, json.dumps(v)) for k, v in env.items())
        return "Sys.setenv(%s)" % sets, "Sys.unsetenv(c(%s))" % ", ".join(json.dumps(k) for k in env)
    return None


class Context:
    def __init__(self, language, cwd):
        self.id = str(uuid.uuid4())
        self.language, self.cwd = language, cwd
        self.lock = asyncio.Lock()
        self.km = self.kc = self.starting = None

    def wire(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def ready(self):
        """Starts the kernel, once for all who ask together."""
        if self.starting is None or (self.starting.done() and self.starting.exception()):
            self.starting = asyncio.ensure_future(self.start())
        await asyncio.shield(self.starting)

    async def start(self):
        if self.km and self.km.has_kernel:  # of a restart that failed
            await self.km.shutdown_kernel(now=True)
        self.km = AsyncKernelManager(kernel_name=KERNELS.get(self.language, self.language))
        await self.km.start_kernel(cwd=self.cwd)
        await self.connect()

    async def connect(self):
        kc = self.km.client()
        kc.start_channels()
        await kc.wait_for_ready(timeout=60)
        self.kc = kc

    async def restart(self):
        await self.ready()
        self.starting = asyncio.ensure_future(self.renew())
        await asyncio.shield(self.starting)

    def disconnect(self):
        """Ends what runs: messages() tells that its client is another's."""
        kc, self.kc = self.kc, None
        if kc:
            kc.stop_channels()

    async def renew(self):
        self.disconnect()
        await self.km.restart_kernel(now=True)
        await self.connect()

    async def stop(self):
        self.disconnect()
        if self.km and self.km.has_kernel:
            await self.km.shutdown_kernel(now=True)

    async def messages(self, code, gone=lambda: False, silent=False):
        """Runs code; its messages, or None where the kernel died. When gone
        tells that nobody listens any more, the code is interrupted."""
        kc = self.kc
        mid = kc.execute(code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False)
        left = last = None
        while True:
            try:
                msg = await kc.get_iopub_msg(timeout=POLL)
            except asyncio.CancelledError:  # what closed channels answer, too
                if self.kc is kc:
                    raise
                msg = None
            except Exception as e:  # queue.Empty
                if self.kc is kc and type(e).__name__ != "Empty":
                    raise
                msg = None
            if self.kc is not kc:  # restarted or removed meanwhile
                yield None
                return
            if gone():
                # By the clock, not by messages: code that prints sends many.
                now = time.monotonic()
                left = left or now
                # Every two seconds: the first may have met code that catches it.
                if last is None or now - last >= 2:
                    await self.km.interrupt_kernel()
                    last = now
                if now - left > 10:  # it will not stop: the context is of no use like this
                    await self.restart()
                    return
            if msg is None:
                if not await self.km.is_alive():
                    await self.restart()
                    yield None
                    return
                continue
            if msg["parent_header"].get("msg_id") != mid:
                continue
            if msg["msg_type"] == "status" and msg["content"]["execution_state"] == "idle":
                return
            yield msg

    async def quietly(self, code):
        async for _ in self.messages(code, silent=True):
            pass


def refuse(status, message):
    return web.json_response({"code": status, "message": message}, status=status)


async def body_of(request):
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text=json.dumps({"code": 400, "message": "the body is no JSON object"}), content_type="application/json")
    return body


class Service:
    def __init__(self, cwd):
        self.cwd = cwd
        self.contexts = {}
        self.defaults = {}  # by language

    def default(self, language):
        """The context of code that names none. Its kernel starts with its
        first code."""
        c = self.defaults.get(language)
        if c is None or c.id not in self.contexts:
            c = self.defaults[language] = Context(language, self.cwd)
            self.contexts[c.id] = c
        return c

    def missing(self, language):
        try:
            KernelSpecManager().get_kernel_spec(KERNELS.get(language, language))
        except (NoSuchKernel, ValueError):
            return refuse(400, "no kernel for the language %s is installed" % language)
        return None

    async def health(self, request):
        return web.Response(text="OK")

    async def create(self, request):
        body = await body_of(request)
        if not isinstance(body.get("language"), (str, type(None))):
            return refuse(400, "language is a string")
        language, cwd = normalise(body.get("language")), body.get("cwd") or self.cwd
        if not isinstance(cwd, str) or not os.path.isdir(cwd) or not os.access(cwd, os.X_OK):
            return refuse(400, "the directory %s is not there, or the user that the kernels run as may not enter it" % (cwd,))
        bad = self.missing(language)
        if bad is not None:
            return bad
        c = Context(language, cwd)
        try:
            await c.ready()
        except BaseException:
            await c.stop()
            raise
        self.contexts[c.id] = c
        return web.json_response(c.wire())

    async def list(self, request):
        return web.json_response([c.wire() for c in self.contexts.values()])

    async def restart(self, request):
        c = self.contexts.get(request.match_info["id"])
        if c is None:
            return refuse(404, "there is no context %s" % request.match_info["id"])
        await c.restart()
        return web.json_response(c.wire())

    async def remove(self, request):
        c = self.contexts.pop(request.match_info["id"], None)
        if c is None:
            return refuse(404, "there is no context %s" % request.match_info["id"])
        await c.stop()
        return web.json_response({})

    async def execute(self, request):
        body = await body_of(request)
        code, env = body.get("code"), body.get("env_vars") or {}
        if not isinstance(code, str):
            return refuse(400, "code is missing")
        if not isinstance(env, dict) or not all(isinstance(v, str) and k.isidentifier() for k, v in env.items()):
            return refuse(400, "env_vars is no object of names and strings")
        cid = body.get("context_id")
        if not all(isinstance(v, str) or v is None for v in (cid, body.get("language"))):
            return refuse(400, "context_id and language are strings")
        if cid and body.get("language"):
            return refuse(400, "give a context or a language, not both")
        if cid:
            c = self.contexts.get(cid)
            if c is None:
                return refuse(404, "there is no context %s" % cid)
        else:
            language = normalise(body.get("language"))
            bad = self.missing(language)
            if bad is not None:
                return bad
            c = self.default(language)
        setting = env_code(c.language, env) if env else None
        if env and setting is None:
            return refuse(400, "env_vars do not work with the language %s" % c.language)

        await c.ready()
        reply = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await reply.prepare(request)
        left = False

        def gone():
            return left or request.transport is None or request.transport.is_closing()

        async def send(event):
            nonlocal left
            if gone():
                return
            try:
                await reply.write(json.dumps(event, default=str).encode() + b"\n")
            except ConnectionError:
                left = True

        async with c.lock:
            if gone():
                return reply
            if self.contexts.get(c.id) is not c:  # removed while this waited
                await send({"type": "unexpected_end_of_execution"})
                await reply.write_eof()
                return reply
            await c.ready()  # it may be restarting
            if setting:
                await c.quietly(setting[0])
            died = False
            async for msg in c.messages(code, gone):
                if msg is None:
                    died = True
                    await send({"type": "unexpected_end_of_execution"})
                    break
                event = event_of(msg)
                if event:
                    await send(event)
            if setting and not died:
                await c.quietly(setting[1])
        if not died:
            await send({"type": "end_of_execution"})
        if not gone():
            await reply.write_eof()
        return reply

    async def begin(self, app):
        for language in ("python", "javascript"):
            if self.missing(language) is None:
                self.default(language)
        await self.default("python").ready()  # before the template is called ready

    async def end(self, app):
        for c in list(self.contexts.values()):
            await c.stop()

    def app(self):
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([
            web.get("/health", self.health), web.post("/execute", self.execute),
            web.get("/contexts", self.list), web.post("/contexts", self.create),
            web.post("/contexts/{id}/restart", self.restart), web.delete("/contexts/{id}", self.remove),
        ])
        app.on_startup.append(self.begin)
        app.on_cleanup.append(self.end)
        return app


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--port", type=int, default=49999)
    p.add_argument("--host", default="0.0.0.0")
    p.add_argument("--cwd", default=os.path.expanduser("~"))
    a = p.parse_args()
    web.run_app(Service(a.cwd).app(), host=a.host, port=a.port, print=None)


if __name__ == "__main__":
    main()
