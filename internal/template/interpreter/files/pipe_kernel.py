"""Jupyter kernels for bash and JavaScript: ipykernel's base class over a
process that keeps the state."""

import json
import os
import select
import subprocess
import sys
import tempfile
import codecs

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

HERE = os.path.dirname(os.path.abspath(__file__))


class PipeKernel(Kernel):
    implementation, implementation_version, banner = "warren", "1", ""
    argv = []

    def __init__(self, **kw):
        super().__init__(**kw)
        self.child = None

    def start_child(self):
        back, theirs = os.pipe()  # the process tells on theirs how a cell ended
        self.child = subprocess.Popen(self.argv + [str(theirs)], pass_fds=[theirs], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        os.close(theirs)
        self.control = back
        self.fds = {self.child.stdout.fileno(): "stdout", self.child.stderr.fileno(): "stderr", back: None}
        self.decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in self.fds}

    def request(self, code):
        raise NotImplementedError

    def send_output(self, fd, data):
        text = self.decoders[fd].decode(data)
        if text and not self.silent:
            self.send_response(self.iopub_socket, "stream", {"name": self.fds[fd], "text": text})

    def run(self, code):
        """The process's answer, a JSON object, or None where it ended."""
        if self.child is None or self.child.poll() is not None:
            self.start_child()
        self.child.stdin.write(self.request(code))
        self.child.stdin.flush()
        answer, live = b"", dict(self.fds)
        while True:
            try:
                done = answer.endswith(b"\n")
                ready, _, _ = select.select(list(live), [], [], 0 if done else None)
                if done and not [fd for fd in ready if live[fd]]:
                    return json.loads(answer)
                for fd in ready:
                    data = os.read(fd, 65536)
                    if live[fd]:
                        if data:
                            self.send_output(fd, data)
                        else:
                            del live[fd]
                    elif data:
                        answer += data
                    else:
                        return None
            except KeyboardInterrupt:
                continue  # the process, in our group, has it too, and ends the cell

    def do_execute(self, code, silent, store_history=True, user_expressions=None, allow_stdin=False, **kw):
        self.silent = silent
        try:
            a = self.run(code)
        except Refused as e:
            a = {"error": ["SyntaxError", str(e), str(e).split("\n")]}
        if a is None:
            self.child.wait()
            os.close(self.control)
            a = {"error": ["Exit", "the process ended with status %d; its state is lost" % self.child.returncode, []]}
            self.child = None
        if a.get("error"):
            name, value, trace = a["error"]
            err = {"ename": name, "evalue": value, "traceback": trace}
            if not silent:
                self.send_response(self.iopub_socket, "error", err)
            return {"status": "error", "execution_count": self.execution_count, **err}
        if a.get("data") and not silent:
            self.send_response(self.iopub_socket, "execute_result",
                               {"execution_count": self.execution_count, "data": a["data"], "metadata": {}})
        return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}

    def do_shutdown(self, restart):
        if self.child and self.child.poll() is None:
            self.child.kill()
        return {"status": "ok", "restart": restart}


class Bash(PipeKernel):
    language_info = {"name": "bash", "mimetype": "text/x-sh", "file_extension": ".sh"}
    argv = ["bash", "--noprofile", "--norc", os.path.join(HERE, "cells.sh")]

    def request(self, code):
        fd, self.cell = tempfile.mkstemp(prefix="cell-", suffix=".sh")
        with os.fdopen(fd, "w") as f:
            f.write(code + "\n")
        return (self.cell + "\n").encode()

    def run(self, code):
        try:
            a = super().run(code)
        finally:
            os.unlink(self.cell)
        if a and a["status"]:
            a["error"] = ["ExitStatus", str(a["status"]), ["exit status %d" % a["status"]]]
        return a


class Refused(Exception):
    """A cell that does not come to run."""


class JavaScript(PipeKernel):
    language_info = {"name": "javascript", "mimetype": "text/javascript", "file_extension": ".js"}
    argv = ["node", os.path.join(HERE, "cells.js")]

    def request(self, code):
        return json.dumps(code).encode() + b"\n"


class TypeScript(JavaScript):
    language_info = {"name": "typescript", "mimetype": "text/typescript", "file_extension": ".ts"}

    def request(self, code):
        # An import of what only later cells use is none to leave out.
        bare = subprocess.run(["esbuild", "--loader=ts", "--log-level=error", "--color=false",
                               "--tsconfig-raw={\"compilerOptions\":{\"preserveValueImports\":true}}"],
                              input=code, capture_output=True, text=True, encoding="utf-8")
        if bare.returncode:
            raise Refused(bare.stderr.strip())
        return super().request(bare.stdout)


if __name__ == "__main__":
    which = {"bash": Bash, "javascript": JavaScript, "typescript": TypeScript}[sys.argv.pop(1)]
    IPKernelApp.launch_instance(kernel_class=which)
