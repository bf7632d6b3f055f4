"""Import directions, what must not load torch, and the size of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("kernels", "quant", "engine", "appliance", "tui")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "quant": {"quant", "kernels"},
    "engine": {"engine", "quant", "kernels"},
    "appliance": {"appliance", "engine", "quant", "kernels"},
    "tui": {"tui"},
}
# Modules of the engine and of quant that the daemon's process, which has no torch, may load.
TORCH_FREE = [
    "appliance.engine.types",
    "appliance.engine.errors",
    "appliance.engine.config",
    "appliance.engine.backends",
    "appliance.engine.gpu.faults",
    "appliance.engine.packed_files",
    "appliance.kernels.checksum",
    "appliance.engine.protocol",
    "appliance.engine.blocks",
    "appliance.engine.tiers.copy_engine",
    "appliance.engine.tiers.copy_thread",
    "appliance.engine.kv_cache",
    "appliance.engine.scheduler",
    "appliance.engine.memory",
    "appliance.engine.stats",
    "appliance.engine.spec",
    "appliance.engine.program",
    "appliance.engine.decoder",
    "appliance.engine.families",
    "appliance.quant.gguf.file",
    "appliance.kernels.native",
    "appliance.daemon.lifecycle",
    "appliance.text.tokenizer",
    "appliance.bench.measure",
    "appliance.cli.bench",
    "appliance.cli.main",
    "appliance.cli.run",
    "appliance.cli.serve",
]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_KERNEL_FUNCTION_LINES = 100


def sources() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def layer_of(module: str) -> str | None:
    """The layer that a dotted module name belongs to, None for other people's modules."""
    parts = module.split(".")
    if parts[0] != "appliance":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "appliance"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "appliance":
                yield from (f"appliance.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        target = layer_of(module)
        if target is not None:
            assert target in MAY_IMPORT[layer], f"{layer} imports {module}"
        elif layer == "kernels":
            name = module.split(".")[0]
            assert name in {"torch", "triton"} or name in sys.stdlib_module_names, f"kernels import {module}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, appliance; from appliance import SamplingParams; "
        "sys.exit(bool({'torch', 'fastapi', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    limit = MAX_KERNEL_FUNCTION_LINES if path.is_relative_to(ROOT / "kernels") else MAX_FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= limit, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer not in ("appliance", "tui")])
def test_package_files_only_hand_names_on(layer: str) -> None:
    for path in (ROOT / layer).rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            assert isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)), (
                f"{path} does more than hand names on"
            )
