"""What an engine is started with, and what it says of itself once it has loaded. Imports no torch."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine, already validated; `None` lets the engine decide.

    Attributes:
        model_path: absolute path of a checkpoint file.
        max_model_len: longest context to serve, in tokens; None: the model's own.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens computed in one step (the chunk size of a long prompt); raised to
            `max_num_seqs` where it is less; None: what suits the backend.
        block_size: tokens in a KV block.
        enable_prefix_caching: keep freed blocks findable by the hash of their tokens.
        kv_cache_memory_bytes: size of the KV pool; None: planned from free memory.
        gpu_memory_utilization: most that a planned pool takes of the free memory, a share; None: what is modest with
            that kind of memory.
        kv_cache_dtype: "float32", "bfloat16", "float16" or "int8", where the backend has it; "auto": its own choice.
        swap_space: GiB of further memory for the blocks of waiting requests; said to be unused.
        quantization: what the user believes the weights to be; disagreement with the tensors is a note.
        seed: makes the seeds drawn for requests without one repeatable; None: they are random.
        num_threads: CPU threads of a step; None: the cores this process may use.
        dtype: what the model is computed in, "float32", "bfloat16" or "float16", where the backend does; "auto": its
            own choice.
        device: "cpu", "cuda", "cuda:0", "cuda:1" ... as this process sees them; "auto": a GPU where one can be used.
        backend: "cpu" (the native kernels), "gpu" (Triton's), "reference" (torch) or "auto": the best that is there.
        activation_precision: what the native kernels round activations to before a product: "int8", "bf16" or
            "float32".
    """

    model_path: str
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    swap_space: float = 0.0
    quantization: str | None = None
    seed: int | None = None
    num_threads: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    activation_precision: str = "int8"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine serves.

    Attributes:
        max_model_len: the context actually served: min(asked for, the model's, what the KV pool holds).
        max_num_batched_tokens: most tokens computed in one step, which may be more than was asked for.
        model_context_len: what the model was made for.
        num_blocks: KV blocks of all groups together.
        kv_block_bytes: size of one; the mean where the groups' differ.
        notes: sentences for the log, where something is not as was asked for.
        backend: who executes steps: "cpu", "gpu" or "reference".
        gpu: name of the GPU that executes them, "" where none does.
        native_isa: instruction set of the native library, or "" when it was not built.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    model_context_len: int
    num_blocks: int
    block_size: int
    kv_block_bytes: int
    weight_bytes: int
    backend: str
    gpu: str = ""
    native_isa: str
    notes: tuple[str, ...] = ()
