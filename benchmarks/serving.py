"""What a client of the daemon sees, measured through HTTP on this machine: `make bench`.

Starts the daemon on the starter model as its own process and asks it with the OpenAI client. Prints a table: time to
ready, decode speed of one stream, throughput and fairness of 16 streams, and how long the first token of a prompt takes
whose first 1,024 tokens were seen before, as a share of the same with an unseen prompt.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

APPLIANCE = Path(sys.executable).with_name("appliance")
PORT = 8017
BASE_URL = f"http://127.0.0.1:{PORT}"
MODEL = "smollm2:135m"
ROUNDS = 5
STREAMS = 16
DECODE_TOKENS = 128
STREAM_TOKENS = 64
PREFIX_TOKENS = 1024


@contextlib.contextmanager
def daemon() -> Iterator[float]:
    """A running daemon; yields the seconds it took from process start to ready."""
    start = time.perf_counter()
    child = subprocess.Popen([APPLIANCE, "serve", MODEL, "--port", str(PORT)], stdout=subprocess.DEVNULL)
    try:
        while True:
            if child.poll() is not None:
                sys.exit(f"the daemon ended with exit code {child.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{BASE_URL}/ready"):
                break
            time.sleep(0.05)
        yield time.perf_counter() - start
    finally:
        child.terminate()
        child.wait()


def token_times(client: OpenAI, prompt: list[int], max_tokens: int) -> list[float]:
    """Seconds from the request to each frame that brought text."""
    start = time.perf_counter()
    stream = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return [time.perf_counter() - start for chunk in stream if chunk.choices and chunk.choices[0].text]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def decode_speed(client: OpenAI, rng: random.Random) -> float:
    """Tokens per second of one stream, after its first token."""
    times = token_times(client, random_prompt(rng, 32), DECODE_TOKENS)
    return (DECODE_TOKENS - 1) / (times[-1] - times[0])


def many_streams(client: OpenAI, rng: random.Random) -> tuple[float, float, float]:
    """Of 16 streams at once: tokens per second in all, and the first and last stream's time to finish."""
    prompts = [random_prompt(rng, 32) for _ in range(STREAMS)]
    start = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        ends = list(pool.map(lambda prompt: token_times(client, prompt, STREAM_TOKENS)[-1], prompts))
    return STREAMS * STREAM_TOKENS / (time.perf_counter() - start), min(ends), max(ends)


def first_token(client: OpenAI, rng: random.Random) -> tuple[float, float]:
    """Seconds to the first token of a 1,024 + 16 token prompt: unseen, and with its first 1,024 tokens seen."""
    prefix = random_prompt(rng, PREFIX_TOKENS)
    cold = token_times(client, prefix + random_prompt(rng, 16), 1)[0]
    shared = token_times(client, prefix + random_prompt(rng, 16), 1)[0]
    return cold, shared


def main() -> None:
    rng = random.Random(0)
    with daemon():
        pass  # the first start pulls the model and warms the disk cache
    with daemon() as ready:
        client = OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", timeout=600)
        decode_speed(client, rng)
        speeds = [decode_speed(client, rng) for _ in range(ROUNDS)]
        crowds = [many_streams(client, rng) for _ in range(3)]
        starts = [first_token(client, rng) for _ in range(ROUNDS)]
    throughput, first, last = (statistics.median(figures) for figures in zip(*crowds, strict=True))
    ratios = [100 * shared / cold for cold, shared in starts]
    cold, shared = (statistics.median(figures) for figures in zip(*starts, strict=True))
    table = Table("figure", "median", "range or remark")
    rows = [
        ("second start: process start to ready", f"{ready:.1f} s", ""),
        (
            "one stream, decode",
            f"{statistics.median(speeds):.1f} tok/s",
            f"{min(speeds):.1f} to {max(speeds):.1f}",
        ),
        (
            f"{STREAMS} streams, in all",
            f"{throughput:.0f} tok/s",
            f"first done {first:.1f} s, last {last:.1f} s",
        ),
        ("first token, unseen prompt of 1,040", f"{cold:.2f} s", ""),
        ("the same with 1,024 tokens seen", f"{shared:.2f} s", ""),
        ("their ratio", f"{statistics.median(ratios):.1f} %", f"{min(ratios):.1f} to {max(ratios):.1f} %"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
