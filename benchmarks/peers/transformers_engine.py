"""transformers in bf16 with a static batch; runs in its own venv and prints figures as JSON.

`python transformers_engine.py FOLDER --threads 2`; FOLDER is what `hf_folder.py` wrote.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 32


@torch.inference_mode()
def decode(model: torch.nn.Module, streams: int, tokens: int) -> float:
    """Tokens a second of a batch, greedily, after the prompts were read."""
    ids = torch.randint(1000, 40000, (streams, PROMPT_TOKENS))
    out = model(ids, use_cache=True)
    start = time.perf_counter()
    for _ in range(tokens):
        ids = out.logits[:, -1:].argmax(-1)
        out = model(ids, past_key_values=out.past_key_values, use_cache=True)
    return streams * tokens / (time.perf_counter() - start)


@torch.inference_mode()
def prefill(model: torch.nn.Module, tokens: int) -> float:
    ids = torch.randint(1000, 40000, (1, tokens))
    start = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 16])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).eval()
    decode(model, 1, 4)
    figures = {"decode, 1 stream": decode(model, 1, options.tokens)}
    for streams in options.streams:
        figures[f"decode, {streams} streams"] = decode(model, streams, options.tokens)
    figures[f"prefill {options.prefill}"] = prefill(model, options.prefill)
    figures["resident memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
