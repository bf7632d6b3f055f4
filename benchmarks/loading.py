"""Loading a large random checkpoint: `python benchmarks/loading.py [gptq|awq|ct|gguf] …`.

For each format writes some 2 GB of random 4-bit weights, loads them in a process of its own, and prints how long that
took beside plainly reading the same files a moment before and after: through one buffer, and into new memory, which
weights need and which costs more than the reading. And how far the process's anonymous memory rose above what it was
before. The files are in the page cache all the time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

HIDDEN, INTERMEDIATE, LAYERS, VOCAB, GROUP = 4096, 11008, 17, 32000, 128
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
ROUNDS = 3
# As the daemon's worker sets it for itself.
WORKER_ENVIRONMENT = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
LOAD_ALL = "--load"


def quantised(format_: str, n: int, k: int) -> dict[str, np.ndarray]:
    """A random layer's tensors by suffix."""
    rng = np.random.default_rng(n * k)

    def words(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.int32)

    def scales(*shape: int) -> np.ndarray:
        return rng.random(shape, dtype=np.float32).astype(np.float16) * np.float16(0.01) + np.float16(1e-3)

    groups = k // GROUP
    if format_ == "gptq":
        order = np.arange(k, dtype=np.int32) // GROUP
        tensors = {"qweight": words(k // 8, n), "qzeros": words(groups, n // 8), "g_idx": order}
        return tensors | {"scales": scales(groups, n)}
    if format_ == "awq":
        return {"qweight": words(k, n // 8), "qzeros": words(groups, n // 8), "scales": scales(groups, n)}
    shape = np.array([n, k], dtype=np.int64)
    return {"weight_packed": words(n, k // 8), "weight_scale": scales(n, groups), "weight_shape": shape}


QUANT_CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "ct": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": True},
            }
        },
        "ignore": ["lm_head"],
    },
}


def write_checkpoint(folder: Path, format_: str) -> None:
    """A model folder of random weights, a shard a layer."""
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "quantization_config": QUANT_CONFIGS[format_],
    }
    (folder / "config.json").write_text(json.dumps(config))
    norm, matrix = np.ones(HIDDEN, np.float16), np.full((VOCAB, HIDDEN), 0.01, np.float16)
    shards = {"model-head.safetensors": {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix}}
    shards["model-head.safetensors"]["model.norm.weight"] = norm
    layer = {name: quantised(format_, n, k) for name, (n, k) in LINEARS.items()}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        tensors = {prefix + "input_layernorm.weight": norm, prefix + "post_attention_layernorm.weight": norm}
        for name, parts in layer.items():
            tensors |= {f"{prefix}{name}.{suffix}": part for suffix, part in parts.items()}
        shards[f"model-{index:02}.safetensors"] = tensors
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    index = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def read_through(folder: Path) -> float:
    """Seconds to read every byte through one buffer."""
    buffer = bytearray(64 << 20)
    start = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def read_into_memory(folder: Path) -> float:
    """Seconds to read every byte and keep it."""
    start = time.perf_counter()
    kept = [path.read_bytes() for path in folder.glob("*.safetensors")]
    seconds = time.perf_counter() - start
    del kept
    return seconds


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def load_and_report(folder: str) -> None:
    """In a process of its own: load the model as the engine does; seconds and the rise of anonymous memory."""
    from appliance.engine.config import EngineConfig
    from appliance.engine.engine import Engine

    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    engine = Engine(EngineConfig(model_path=folder, max_model_len=512))
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "rise": peak - before, "weights": engine.info.weight_bytes}))


def main() -> None:
    formats = [name for name in sys.argv[1:] if name in QUANT_CONFIGS] or list(QUANT_CONFIGS)
    table = Table(title="Loading")
    for title in ("format", "size", "read through", "read into memory", "load", "peak memory"):
        table.add_column(title)
    for format_ in formats:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
            folder = Path(name)
            write_checkpoint(folder, format_)
            size = sum(path.stat().st_size for path in folder.iterdir())
            through, into, loads, rises = [], [], [], []
            for _ in range(ROUNDS):
                command = [sys.executable, __file__, LOAD_ALL, name]
                child = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=WORKER_ENVIRONMENT)
                result = json.loads(child.stdout)
                loads.append(result["seconds"])
                rises.append(result["rise"])
                through.append(read_through(folder))
                into.append(read_into_memory(folder))
        load = statistics.median(loads)
        shares = [statistics.median(reads) for reads in (through, into)]
        table.add_row(
            format_,
            f"{size / 1e9:.2f} GB",
            *(f"{read:.2f} s, load {read / load:.0%} as fast" for read in shares),
            f"{load:.2f} s ({size / load / 1e9:.1f} GB/s)",
            f"{max(rises) / size:.2f} × its size",
        )
    Console().print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == [LOAD_ALL]:
        load_and_report(sys.argv[2])
    else:
        main()
