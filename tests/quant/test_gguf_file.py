"""The GGUF parser against the gguf package's writer, and against damaged files."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gguf.file import GGML_TYPES, GGUFFile

GOLDEN = Path(__file__).parents[1] / "golden"
MINI = GOLDEN / "gguf_q4_0" / "mini-q4_0.gguf"
HEADER_BYTES = 24


def header(n_tensors: int, n_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "a.bool": True,
        "a.ints": [1, -2, 3],
        "a.floats": [0.5, -1.25],
        "a.strings": ["", "é", "a\nb"],
        "a.bools": [True, False],
        "a.text": "ünïcode",
    }
    writer.add_bool("a.bool", True)
    for key in ("a.ints", "a.floats", "a.strings", "a.bools"):
        writer.add_array(key, values[key])
    writer.add_string("a.text", "ünïcode")
    writer.add_uint64("a.u64", 2**63)
    writer.add_int8("a.i8", -128)
    writer.add_float64("a.f64", 1e300)
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("m", matrix)
    writer.add_tensor("v", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            **values,
            "a.u64": 2**63,
            "a.i8": -128,
            "a.f64": 1e300,
        }
        assert file.tensors["m"].shape == (2, 3)
        assert file.tensors["v"].type.name == "F16"
        raw = file.data(file.tensors["m"])
    # The view outlives the file it came from.
    assert raw.shape == (2, 12)
    assert np.array_equal(raw.view("<f4"), matrix)


def test_agrees_with_the_gguf_packages_reader() -> None:
    reader = gguf.GGUFReader(MINI)
    with GGUFFile(MINI) as file:
        fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert file.metadata == fields
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(theirs.shape.tolist()[::-1])
            assert ours.type.name == theirs.tensor_type.name
            assert file.data(file.tensors[theirs.name]).tobytes() == theirs.data.tobytes()


def test_type_table_is_the_gguf_packages() -> None:
    for kind in GGML_TYPES.values():
        theirs = gguf.GGMLQuantizationType(kind.id)
        assert kind.name == theirs.name
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


def test_version_2_is_read(tmp_path: Path) -> None:
    body = text("k") + struct.pack("<If", 6, 1.5)
    assert opened(tmp_path, header(0, 1, version=2) + body).metadata == {"k": 1.5}


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2H", 2, 2, 7, 8)
    body = text("k") + struct.pack("<IIQ", 9, 9, 2) + inner + struct.pack("<IQ", 8, 1) + text("z")
    assert opened(tmp_path, header(0, 1) + body).metadata == {"k": [[7, 8], ["z"]]}


def test_alignment_moves_the_data(tmp_path: Path) -> None:
    infos = text("general.alignment") + struct.pack("<II", 4, 256) + tensor("t", (4,), 0, 0)
    content = (header(1, 1) + infos).ljust(256, b"\0") + struct.pack("<4f", 1, 2, 3, 4)
    file = opened(tmp_path, content)
    assert file.tensors["t"].offset == 256
    assert file.data(file.tensors["t"]).view("<f4").tolist() == [[1, 2, 3, 4]]


def test_a_type_that_is_known_but_not_read_still_parses(tmp_path: Path) -> None:
    content = (header(1, 0) + tensor("t", (2, 256), 16, 0)).ljust(96, b"\0") + bytes(2 * 66)
    info = opened(tmp_path, content).tensors["t"]
    assert (info.type.name, info.shape, info.row_bytes, info.nbytes) == ("IQ2_XXS", (2, 256), 66, 132)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "expected b'GGUF'"),
        (b"\x80\x02pickle", "not a GGUF file"),
        (b"GGUF\x03", "within the version"),
        (header(2**63, 0), "the number of tensors is 9223372036854775808"),
        (header(0, 2**40), "the number of metadata pairs is"),
        (header(5, 0) + bytes(10), "remaining 18 bytes"),
        (header(0, 1) + struct.pack("<Q", 2**62) + bytes(99), "the key of metadata pair 0"),
        (header(0, 1) + text("k") + struct.pack("<I", 13) + bytes(9), "unknown value type 13"),
        (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 99, 1) + bytes(9), "unknown element type 99"),
        (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 10, 2**61), "the length of metadata 'k'"),
        (
            header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2) + text("a") + struct.pack("<Q", 9),
            "element 1",
        ),
        (header(0, 1) + text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe" + bytes(9), "is not UTF-8"),
        (header(0, 2) + 2 * (text("k") + struct.pack("<Ib", 7, 1)), "'k' occurs twice"),
        (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 24), "expected a power of two"),
        (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0), "expected a power of two"),
        (header(1, 0) + tensor("t", (4,), 0, 0) + bytes(64), None),
        (header(2, 0) + 2 * tensor("t", (4,), 0, 0) + bytes(64), "tensor 't' occurs twice"),
        (header(2, 0) + tensor("a", (4,), 0, 0) + tensor("b", (4,), 0, 0) + bytes(96), "'a' and 'b' overlap"),
        (header(1, 0) + tensor("t", (), 0, 0) + bytes(64), "has 0 dimensions"),
        (header(1, 0) + tensor("t", (1,) * 5, 0, 0) + bytes(64), "has 5 dimensions"),
        (header(1, 0) + tensor("t", (4, 0), 0, 0) + bytes(64), "impossible"),
        (header(1, 0) + tensor("t", (2**32, 2**32), 0, 0) + bytes(64), "impossible"),
        (header(1, 0) + tensor("t", (2, 33), 2, 0) + bytes(99), "multiple of 32 (Q4_0)"),
        (
            header(1, 0) + tensor("t", (2, 288), 12, 0) + bytes(999),
            "'t' has rows of 288 values, expected a multiple of 256 (Q4_K)",
        ),
        (header(1, 0) + tensor("t", (4,), 0, 4) + bytes(99), "offset 4, expected a multiple of 32"),
        (header(1, 0) + tensor("t", (4,), 0, 2**62) + bytes(99), "'t' lacks 16 of its 16 bytes"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str | None) -> None:
    if message is None:
        assert opened(tmp_path, content).tensors["t"].nbytes == 16
        return
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, content)
    assert message in str(caught.value)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(0, 0, version=1), "version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(1, 0) + tensor("t", (4,), 77, 0) + bytes(99), "'t' has the unknown ggml type 77"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        opened(tmp_path, content)
    assert message in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = MINI.read_bytes()
    draw = random.Random(1)
    cuts = [*range(64), *(draw.randrange(len(whole)) for _ in range(300)), len(whole) - 1]
    for cut in cuts:
        with pytest.raises(CheckpointError):
            opened(tmp_path, whole[:cut])


def test_a_truncated_file_names_the_tensor_and_the_bytes(tmp_path: Path) -> None:
    with GGUFFile(MINI) as file:
        last = max(file.tensors.values(), key=lambda info: info.offset)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, MINI.read_bytes()[: last.offset + last.nbytes - 7])
    assert f"'{last.name}' lacks 7 of its {last.nbytes} bytes" in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes_are_read_or_refused_and_quickly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(MINI.read_bytes())
    with GGUFFile(MINI) as file:
        end = min(info.offset for info in file.tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    began = time.perf_counter()
    try:
        with GGUFFile(path) as file:
            for info in file.tensors.values():
                assert file.data(info).nbytes == info.nbytes
    except CheckpointError:
        pass
    assert time.perf_counter() - began < 1.0
