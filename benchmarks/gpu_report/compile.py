"""Triton kernels to machine code, and what can be read off it, without a GPU or its driver."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_PRODUCTS = re.compile(r"(?:versionMajor|instrShape|kWidth) = (?:\d+|\[[\d, ]+\])")
_THREADS = 32


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel compiled for some types and constants.

    Attributes:
        name: of the table's row.
        kernel: what `triton.jit` made.
        types: of arguments by their names, as Triton writes them: "*fp16", "i32"; with ":16" where one is known to be a
            multiple of 16. An argument without a type is a constant.
        given: the constants, None where one isn't there, and the compiler's options, `num_warps` among them.
        work: how many elements (weights, say) one turn of the innermost loop treats, over all lanes; 0: not counted.
        most: instructions of a lane for an element that are allowed.
        architectures: those that it runs on.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    given: Mapping[str, Any]
    work: int = 0
    most: float = math.inf
    architectures: tuple[int, ...] = (86, 89, 90)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a variant on one architecture.

    Attributes:
        registers: of a thread.
        spills: instructions that move registers to memory and back.
        shared: bytes of a program.
        copies: asynchronous ones of 16 bytes in the loop that does most products.
        instructions: of a lane in that loop, for each element of its work; 0.0 where it isn't counted.
        occupancy: the share of a multiprocessor's warps that can be there at once.
        products: the tensor cores' instruction and how many neighbours of a sum's terms a lane has, which say in what
            order terms are added up.
    """

    registers: int
    spills: int
    shared: int
    copies: int
    instructions: float
    occupancy: float
    products: str


@dataclass(frozen=True, slots=True)
class _Multiprocessor:
    """CUDA C++ programming guide, technical specifications by compute capability."""

    warps: int
    programs: int
    shared: int
    registers: int = 65536

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        of_warp = math.ceil(registers * _THREADS / 256) * 256
        by_registers = self.registers // of_warp // warps
        # A program takes 1 KiB more than it asks for.
        by_shared = self.shared // (math.ceil(shared / 128) * 128 + 1024)
        return min(by_registers, by_shared, self.warps // warps, self.programs) * warps / self.warps


ARCHITECTURES = {
    86: _Multiprocessor(warps=48, programs=16, shared=100 << 10),
    89: _Multiprocessor(warps=48, programs=24, shared=100 << 10),
    90: _Multiprocessor(warps=64, programs=32, shared=228 << 10),
}


def compile_variant(variant: Variant, architecture: int) -> Compiled:
    """Compile for an architecture of `ARCHITECTURES` by the Triton that is imported."""
    names, warps = variant.kernel.arg_names, variant.given["num_warps"]
    signature = {name: variant.types.get(name, "constexpr").removesuffix(":16") for name in names}
    hints = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if variant.types.get(name, "").endswith(":16")
    }
    constants = {name: variant.given.get(name) for name, kind in signature.items() if kind == "constexpr"}
    options = {name: value for name, value in variant.given.items() if name not in signature}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=hints)
    built = triton.compile(source, target=GPUTarget("cuda", architecture, _THREADS), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        opcodes, loops = _parse(_run("nvdisasm", "-c", file.name))
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    start, stop = max(loops, key=lambda loop: _products(opcodes, *loop), default=(0, len(opcodes)))
    loop = opcodes[start:stop]
    shared = built.metadata.shared
    return Compiled(
        registers=registers,
        spills=sum(opcode.startswith(("STL", "LDL")) for opcode in opcodes),
        shared=shared,
        copies=sum(opcode.startswith("LDGSTS") and ".128" in opcode for opcode in loop),
        instructions=round(len(loop) * _THREADS * warps / variant.work, 2) if variant.work else 0.0,
        occupancy=round(ARCHITECTURES[architecture].occupancy(registers, shared, warps), 2),
        products=" ".join(sorted(set(_PRODUCTS.findall(built.asm["ttgir"])))),
    )


def _run(tool: str, *args: str) -> str:
    return subprocess.run([_TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def _parse(assembly: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Opcodes in their order, and loops: the first and the place after the last of each."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := _INSTRUCTION.search(line):
            opcode, operands = found.groups()
            target = re.search(r"\.L_x_\d+", operands)
            # A program ends in a branch to itself.
            if opcode == "BRA" and target and labels.get(target[0], len(opcodes)) < len(opcodes):
                loops.append((labels[target[0]], len(opcodes) + 1))
            opcodes.append(opcode)
    return opcodes, loops


def _products(opcodes: Sequence[str], start: int, stop: int) -> tuple[int, int]:
    """How many products of tensor cores a loop has; of two with the same, the shorter one counts for more."""
    return sum("MMA" in opcode for opcode in opcodes[start:stop]), start - stop
