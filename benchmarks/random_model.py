"""Writes a GGUF file of random weights in the shape of Llama 3.2 1B: `python benchmarks/random_model.py OUT.gguf`.

Its matrices are Q4_0, its embedding, which is the head too, Q8_0 (llama.cpp's quantiser would choose Q6_K). The
tokeniser is the starter's, its vocabulary filled up to the shape's. Our engine and llama.cpp both load it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 2048, 16, 32, 8, 64, 8192, 128256
GROUP = 32
# Of the weights, as usual in models of this size.
STANDARD_DEVIATION = 0.02
# Bytes of a group's codes, and the standard deviation of a code that is any number equally likely.
CODES = {Type.Q4_0: (16, 4.61), Type.Q8_0: (32, 73.9)}


def matrix(rng: np.random.Generator, type_: Type, rows: int, columns: int) -> np.ndarray:
    """Random groups: an fp16 scale, then the codes."""
    width, spread = CODES[type_]
    groups = rng.integers(0, 256, (rows, columns // GROUP, 2 + width), dtype=np.uint8)
    scale = np.array([STANDARD_DEVIATION / spread], np.float16)
    groups[:, :, :2] = scale.view(np.uint8)
    return groups.reshape(rows, -1)


def copy_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    reader = gguf.GGUFReader(source)
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value = field.contents()
        if key == "tokenizer.ggml.tokens":
            value += [f"[unused {index}]" for index in range(VOCAB - len(value))]
        if key == "tokenizer.ggml.token_type":
            value += [int(gguf.TokenType.UNUSED)] * (VOCAB - len(value))
        writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)


def write(path: Path, tokenizer: Path) -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random 1B")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(LAYERS)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    copy_tokenizer(writer, tokenizer)
    norm = np.ones(HIDDEN, np.float32)
    writer.add_tensor("token_embd.weight", matrix(rng, Type.Q8_0, VOCAB, HIDDEN), raw_dtype=Type.Q8_0)
    writer.add_tensor("output_norm.weight", norm)
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
        for name, (rows, columns) in shapes.items():
            codes = matrix(rng, Type.Q4_0, rows, columns)
            writer.add_tensor(f"blk.{layer}.{name}.weight", codes, raw_dtype=Type.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    from appliance.settings import load_settings
    from appliance.store import Store

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="OUT.gguf")
    parser.add_argument("--tokenizer", type=Path, help="a .gguf file to take it from; default: the starter")
    options = parser.parse_args()
    write(
        options.path, options.tokenizer or Store(load_settings({}).download_dir).resolve("smollm2:135m").path
    )


if __name__ == "__main__":
    main()
