"""The engine's speed in this process, without HTTP: `python benchmarks/engine.py [--model PATH]`.

Decode at batch 1 and of 8 and 16 streams (steps in which all of them decode), and prefill of prompts that nobody has
seen; beside it the memory bandwidth of the same minutes, and which share of it decode's weights take. `--csv -` prints
one line a figure and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.machine import usable_cpus
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import Request

STARTER = "smollm2:135m"
PROMPT_TOKENS = 32
_ids = count()


def request(engine: Engine, rng: random.Random, prompt_tokens: int, output_tokens: int) -> Request:
    """A random prompt, continued greedily to exactly so many tokens."""
    prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(prompt_tokens))
    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    return Request(id=str(next(_ids)), prompt_ids=prompt, sampling=sampling, arrived_at=time.time())


def decode(engine: Engine, rng: random.Random, streams: int, tokens: int) -> float:
    """Tokens a second over the steps in which all streams got one and nothing else was computed."""
    for _ in range(streams):
        engine.add(request(engine, rng, PROMPT_TOKENS, tokens))
    seconds, steps = 0.0, 0
    while engine.has_work:
        start = time.perf_counter()
        plan = engine.plan()
        engine.run(plan)
        if len(plan.rows) == streams and all(row.n_tokens == 1 for row in plan.rows):
            seconds += time.perf_counter() - start
            steps += 1
    return streams * steps / seconds


def prefill(engine: Engine, rng: random.Random, tokens: int) -> float:
    """Prompt tokens a second, to the first token of the answer."""
    engine.add(request(engine, rng, tokens, 1))
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    return tokens / (time.perf_counter() - start)


def bandwidth(threads: int) -> float:
    """GB/s at which this many threads read memory: the best of a few passes over a gigabyte."""
    parts = np.array_split(np.ones(1 << 28, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - start))
    return best / 1e9


def figures(
    engine: Engine, options: argparse.Namespace, threads: int
) -> Iterator[tuple[str, str, list[float]]]:
    """Name, unit and the values of each round."""
    rng = random.Random(options.seed)
    decode(engine, rng, 1, 8)  # warms caches
    single = [decode(engine, rng, 1, options.tokens) for _ in range(options.rounds)]
    yield "decode, 1 stream", "tok/s", single
    for streams in options.streams:
        values = [decode(engine, rng, streams, options.tokens) for _ in range(options.rounds)]
        yield f"decode, {streams} streams", "tok/s", values
    yield (
        f"prefill {options.prefill}",
        "tok/s",
        [prefill(engine, rng, options.prefill) for _ in range(options.rounds)],
    )
    read = bandwidth(threads)
    yield "memory bandwidth", "GB/s", [read]
    weights = engine.info.weight_bytes / 1e9
    yield "weights read by a token", "GB", [weights]
    yield "decode's share of the bandwidth", "%", [100 * weights * speed / read for speed in single]
    yield "resident memory", "GB", [engine.stats().rss_bytes / 1e9]


def starter() -> Path:
    from appliance.settings import load_settings
    from appliance.store import Store

    return Store(load_settings({}).download_dir).resolve(STARTER).path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a .gguf file or a model folder; default: the installed starter"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--backend", help="as the setting of this name")
    parser.add_argument("--activation-precision", help="as the setting of this name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--prefill", type=int, default=512, help="length of a prompt")
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--csv", metavar="FILE", help="write the figures there too; -: print them instead of a table"
    )
    options = parser.parse_args()
    model = (options.model or starter()).absolute()
    chosen = {"backend": options.backend, "activation_precision": options.activation_precision}
    start = time.perf_counter()
    engine = Engine(
        EngineConfig(
            model_path=str(model),
            max_model_len=max(1024, options.prefill + 16),
            num_threads=options.threads,
            **{name: value for name, value in chosen.items() if value is not None},
        )
    )
    loaded = time.perf_counter() - start
    rows = [("load", "s", [loaded]), *figures(engine, options, options.threads or usable_cpus())]
    if options.csv:
        with open(
            1 if options.csv == "-" else options.csv, "w", newline="", closefd=options.csv != "-"
        ) as file:
            writer = csv.writer(file)
            writer.writerow(("figure", "unit", "median", "lowest", "highest"))
            writer.writerows((name, unit, statistics.median(v), min(v), max(v)) for name, unit, v in rows)
    if options.csv != "-":
        table = Table(
            "figure",
            "median",
            "range",
            title=f"{model.name}; {engine.info.backend}, {engine.info.native_isa}",
        )
        for name, unit, values in rows:
            span = f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else ""
            table.add_row(name, f"{statistics.median(values):.2f} {unit}", span)
        Console().print(table)
        for sentence in engine.info.notes:
            print(f"note: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    main()
