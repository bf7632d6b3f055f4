"""OpenVINO GenAI in process, with continuous batching; runs in its own venv and prints figures as JSON.

`python openvino_engine.py FOLDER --threads 2`; FOLDER is what `optimum-cli export openvino` wrote.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

VOCAB = 40000
PROMPT_TOKENS = 32


def decode(pipe: genai.ContinuousBatchingPipeline, rng: random.Random, streams: int, tokens: int) -> float:
    """Tokens a second over the steps in which every stream got one."""
    config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    # Held to the end: a request whose handle is gone is dropped.
    handles = [pipe.add_request(index, prompt(rng, PROMPT_TOKENS), config) for index in range(streams)]
    pipe.step()  # the prompts
    seconds, steps = 0.0, 0
    while pipe.has_non_finished_requests():
        start = time.perf_counter()
        pipe.step()
        seconds += time.perf_counter() - start
        steps += 1
    if any(len(handle.read_all()[0].generated_ids) != tokens for handle in handles):
        raise SystemExit("OpenVINO GenAI ended an answer early")
    return streams * steps / seconds


def prefill(pipe: genai.ContinuousBatchingPipeline, rng: random.Random, tokens: int) -> float:
    config = genai.GenerationConfig(max_new_tokens=1, do_sample=False)
    handle = pipe.add_request(0, prompt(rng, tokens), config)
    start = time.perf_counter()
    while pipe.has_non_finished_requests():
        pipe.step()
    seconds = time.perf_counter() - start
    if not handle.read_all():
        raise SystemExit("OpenVINO GenAI dropped the prompt")
    return tokens / seconds


def prompt(rng: random.Random, tokens: int) -> ov.Tensor:
    return ov.Tensor(np.array([[rng.randrange(1000, VOCAB) for _ in range(tokens)]], np.int64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--activation-group", type=int, help="DYNAMIC_QUANTIZATION_GROUP_SIZE")
    options = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = max(512, options.prefill)
    properties = {"INFERENCE_NUM_THREADS": options.threads}
    if options.activation_group is not None:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = options.activation_group
    pipe = genai.ContinuousBatchingPipeline(options.folder, scheduler, "CPU", properties)
    rng = random.Random()
    decode(pipe, rng, 1, 8)
    figures = {"decode, 1 stream": decode(pipe, rng, 1, options.tokens)}
    for streams in options.streams:
        figures[f"decode, {streams} streams"] = decode(pipe, rng, streams, options.tokens)
    figures[f"prefill {options.prefill}"] = prefill(pipe, rng, options.prefill)
    figures["resident memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
