"""Compares us with other engines on one model: alternating rounds, medians, ratios.

    python -m benchmarks.peers install llama.cpp openvino transformers vllm
    python -m benchmarks.peers engine llama.cpp MODEL.gguf
    python -m benchmarks.peers engine openvino MODEL.gguf --peer-model FOLDER
    python -m benchmarks.peers server llama.cpp MODEL.gguf -- --streams 1,8,16

What follows `--` goes to `appliance bench` for a server, to the peer's measurement for an engine. docs/performance.md
says which folders the peers that read no GGUF want and how they are made.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers import engines, install, servers

Measure = Callable[[], dict[str, float]]
PEERS = ("llama.cpp", "openvino", "transformers", "vllm")
ENGINES = {"openvino": engines.script("openvino"), "transformers": engines.script("transformers")}


def main() -> None:
    options = _options()
    if options.what == "install":
        for peer in options.peers:
            install.install(peer, options.venvs, options.jobs)
        return
    folder: Path = options.venvs / options.peer
    model = options.model.absolute()
    peer_model = (options.peer_model or model).absolute()
    with contextlib.ExitStack() as stack:
        if options.what == "engine":
            pair = _engines(options, folder, model, peer_model)
        else:
            program = folder / "bin" / ("llama-server" if options.peer == "llama.cpp" else "vllm")
            program = options.binary or program
            urls = [
                stack.enter_context(servers.running("ours", program, model, options.threads)),
                stack.enter_context(servers.running(options.peer, program, peer_model, options.threads)),
            ]
            pair = tuple((lambda url=url: servers.ask(url, options.more)) for url in urls)
        rounds = [tuple(measure() for measure in pair) for _ in range(options.rounds)]
    _report(options, [ours for ours, _ in rounds], [peer for _, peer in rounds])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    venvs = Path.home() / ".cache" / "appliance-peers"
    parser.add_argument("--venvs", type=Path, default=venvs, help=f"where the peers are; default: {venvs}")
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("install")
    one.add_argument("peers", nargs="+", choices=PEERS)
    one.add_argument("--jobs", type=int, default=2, help="compilers at once")
    for name, peers in (("engine", ("llama.cpp", *ENGINES)), ("server", ("llama.cpp", "vllm"))):
        one = commands.add_parser(name)
        one.add_argument("peer", choices=peers)
        one.add_argument("model", type=Path, help="for us, and for a peer that reads it too")
        one.add_argument("--peer-model", type=Path, help="the same model in the peer's form")
        one.add_argument(
            "--binary", type=Path, help="llama-server, or the folder with llama-bench, of one's own"
        )
        one.add_argument("--rounds", type=int, default=5)
        one.add_argument("--threads", type=int, default=2)
        one.add_argument("--csv", type=Path)
        one.epilog = "What follows -- goes to the peer's measurement, or to `appliance bench`."
    # By hand: argparse takes what follows -- only where no option stands between it and the model.
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.more = given[end + 1 :]
    options.venvs = options.venvs.expanduser().absolute()
    return options


def _engines(
    options: argparse.Namespace, folder: Path, model: Path, peer_model: Path
) -> tuple[Measure, Measure]:
    threads, more = options.threads, options.more

    def peer() -> dict[str, float]:
        if options.peer == "llama.cpp":
            return engines.llama_cpp(options.binary or folder / "bin", peer_model, threads, more)
        return ENGINES[options.peer](folder / "bin" / "python", peer_model, threads, more)

    return (lambda: engines.ours(model, threads, [])), peer


def _report(
    options: argparse.Namespace, ours: list[dict[str, float]], theirs: list[dict[str, float]]
) -> None:
    """The figures that both have; a ratio is of two medians, its range of the rounds' own."""
    rows = []
    for name in (name for name in ours[0] if all(name in found for found in (*ours, *theirs))):
        left, right = [found[name] for found in ours], [found[name] for found in theirs]
        ratios = [a / b for a, b in zip(left, right, strict=True)]
        medians = statistics.median(left), statistics.median(right)
        rows.append((name, *medians, medians[0] / medians[1], min(ratios), max(ratios)))
    table = Table(
        title=f"{options.model.name}: {options.what}, {len(ours)} rounds, {options.threads} threads"
    )
    for title in ("figure", "ours", options.peer, "ratio", "of single rounds"):
        table.add_column(title, justify="left" if title == "figure" else "right")
    for name, left, right, ratio, low, high in rows:
        table.add_row(name, f"{left:.2f}", f"{right:.2f}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}")
    Console().print(table)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("figure", "ours", options.peer, "ratio", "lowest", "highest"))
            writer.writerows(rows)


if __name__ == "__main__":
    main()
