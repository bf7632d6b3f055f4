"""How large everything is that is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """
    Attributes:
        dtypes: of activations.
        stream_bytes: that are read or copied to measure bandwidth.
        square: rows and columns of the product that measures tensor cores.
        launches: of an empty kernel.
        schemes: of quantised weights, by the names of tests/quant/random_weights.py.
        matrix: rows and columns, where results are checked.
        matrix_rows: of x there.
        contexts: of the sequences whose attention is checked.
        attention_cases: by their names; None: all.
        rows: of x, where time is measured.
        matrices: rows and columns, where time is measured.
        experts: their number, those of a row, and the width of a row and of what is inside one, where time is measured.
        decode_contexts, prefill: tokens, where time is measured; and batches.
        layers: of the KV memory that attention is measured in; kv_heads, group and head_dim of its heads.
        hidden, intermediate, vocab: of the model, with as many layers and such heads.
        swap_blocks: that are moved between memories.
        models: of tests/golden, run whole; and tokens of their prompt and in all.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    stream_bytes: int = 2 << 30
    square: int = 8192
    launches: int = 1000
    repeats: int = 7
    schemes: tuple[str, ...] = ("sym4", "zp4", "affine4", "iq4_nl", "kquant4", "zp2", "zp8", "kquant6")
    matrix: tuple[int, int] = (1088, 2176)
    matrix_rows: tuple[int, ...] = (1, 9, 17, 33, 130, 601)
    contexts: tuple[int, ...] = (1, 17, 300, 1500, 2049)
    attention_cases: tuple[str, ...] | None = None
    rows: tuple[int, ...] = (1, 8, 32, 512, 2048)
    matrices: tuple[tuple[str, int, int], ...] = (
        ("qkv", 6144, 4096),
        ("o", 4096, 4096),
        ("gate and up", 28672, 4096),
        ("down", 4096, 14336),
    )
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)
    batches: tuple[int, ...] = (1, 8, 32)
    decode_contexts: tuple[int, ...] = (1024, 4096, 16384)
    prefill: int = 2048
    layers: int = 32
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    swap_blocks: int = 256
    models: tuple[str, ...] = (
        *(
            "arch_llama",
            "gguf_q4_k_m",
            "awq_gemm_g64",
            "arch_qwen3",
            "gptqmodel_w4_g64_sym_desc",
            "arch_gemma3_text",
        ),
        *("ct_w4a16_g64_asym_gptq", "gguf_q6_k", "arch_gpt_oss", "arch_qwen3_moe", "gptqmodel_w8_g128_sym"),
        *(
            "arch_gemma2",
            "gguf_iq4_nl",
            "arch_olmo2",
            "gguf_q4_1",
            "arch_phi3",
            "ct_fp8_dynamic",
            "arch_mixtral",
        ),
        *("gptqmodel_w2_g32_asym", "arch_smollm3", "arch_granite", "arch_mistral", "arch_qwen2"),
    )
    model_tokens: tuple[int, int] = (25, 40)


FULL = Sizes()
TINY = Sizes(
    dtypes=(torch.float16,),
    stream_bytes=1 << 18,
    square=64,
    launches=2,
    repeats=1,
    schemes=("zp4", "kquant4"),
    matrix=(64, 128),
    matrix_rows=(1, 9),
    contexts=(1, 20),
    attention_cases=("Llama, int8",),
    rows=(1, 9),
    matrices=(("square", 64, 128),),
    experts=(4, 2, 64, 64),
    batches=(2,),
    decode_contexts=(20,),
    prefill=20,
    layers=1,
    kv_heads=1,
    group=2,
    head_dim=64,
    hidden=128,
    intermediate=128,
    vocab=64,
    swap_blocks=2,
    models=("arch_qwen3",),
    model_tokens=(17, 19),
)
