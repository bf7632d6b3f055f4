"""A roofline of decoding and prefill on GPUs by their data sheets: a model, nothing of it is measured.

`python -m benchmarks.roofline` prints it; `--update` puts it into docs/performance.md.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.roofline.cost import (
    DENSE,
    DEVICES,
    GROUPS_OF_32,
    GROUPS_OF_128,
    INT8,
    Cost,
    Load,
    Model,
    Setting,
    by_name,
    step,
)

_PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
_HEADING = "## GPUs: a model, not a measurement\n\n"
BATCHES = (1, 8, 32)
CONTEXT, PROMPT = 1000, 2048
_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "vocab_size": 151936}
# From the models' config.json, what shapes need.
MODELS = (
    Model(
        "Llama 3.1 8B",
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
        },
    ),
    Model(
        "Qwen3 8B",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            **_QWEN3,
        },
    ),
    Model(
        "Qwen3 30B A3B",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            **_QWEN3,
        },
    ),
)


def report() -> str:
    names, device = " / ".join(map(str, BATCHES)), DEVICES[-1].name
    parts = [
        _text(
            """A **model**, printed by `python -m benchmarks.roofline`: arithmetic on data sheets, nothing of it
            measured. An operation's floor is the longest of three: weights, keys and values through memory once;
            products at the peak of the tensor cores (16-bit floats added up in float32); and, of products with
            quantised weights, their instructions by the compile table through the schedulers. What one kernel leaves
            for the next counts as memory only where the cache does not hold it. Kernels start without a gap, and
            nothing overlaps between them. Routers choose every expert equally often."""
        ),
        _text(
            f"""Operations of a layer of {MODELS[0].name} ({GROUPS_OF_128.name}; fp16 KV, {CONTEXT:,} tokens), and
            heads, in µs at batch {names}; *issue*: the time of their instructions as a share of the floor, at
            batch 1:"""
        ),
        _table(["operation", "MB at batch 1", *_columns("{}", "{}, issue")], _operations(MODELS[0])),
        _text(
            f"""Decoding, tokens a second of all sequences at batch {names}, contexts of {CONTEXT:,} tokens; *gaps*:
            what a step at batch 1 would take more on the {device} were there 1 µs between launches:"""
        ),
        _table(
            ["model, weights", "head", "KV", "GB at batch 1", "launches", "gaps", *_columns("{}")],
            _decoding(),
        ),
        _text(f"Prefill of {PROMPT:,} tokens, {GROUPS_OF_128.name}, bf16 head, fp16 KV:"),
        _table(["model", *_columns("{}", "{}, of it attention")], _prefill()),
    ]
    return "\n\n".join(parts) + "\n"


def _text(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 150)


def _columns(*patterns: str) -> list[str]:
    return [pattern.format(device.name) for device in DEVICES for pattern in patterns]


def _operations(model: Model) -> Iterator[list[str]]:
    setting = Setting()
    steps = [step(model, setting, Load(batch, CONTEXT)) for batch in BATCHES]
    with_int8 = [step(model, Setting(head=INT8), Load(batch, CONTEXT)) for batch in BATCHES]
    for (name, *_), *_ in zip(*map(by_name, steps), strict=True):
        if name == "head":
            yield _operation("head, bf16", name, steps)
            yield _operation("head, int8", name, with_int8)
        elif _first(steps[0], name).memory > 1e6:
            yield _operation(name, name, steps)


def _operation(label: str, name: str, steps: Sequence[list[Cost]]) -> list[str]:
    costs = [_first(each, name) for each in steps]
    cells = [label, _number(costs[0].memory / 1e6)]
    for device in DEVICES:
        cells.append(" / ".join(_number(cost.seconds(device) * 1e6) for cost in costs))
        cells.append(f"{costs[0].issuing(device) / costs[0].seconds(device):.0%}" if costs[0].codes else "–")
    return cells


def _first(costs: list[Cost], name: str) -> Cost:
    return next(cost for found, cost, _ in by_name(costs) if found == name)


def _decoding() -> Iterator[list[str]]:
    for model in MODELS:
        for scheme in (GROUPS_OF_128, GROUPS_OF_32):
            for head in (DENSE, INT8):
                for kv, kv_bytes in (("fp16", 2), ("int8", 1)):
                    setting = Setting(scheme, head, kv_bytes)
                    steps = [step(model, setting, Load(batch, CONTEXT)) for batch in BATCHES]
                    launches = sum(cost.launches for cost in steps[0])
                    yield [
                        f"{model.name}, {scheme.name}",
                        head.name,
                        kv,
                        _number(sum(cost.memory for cost in steps[0]) / 1e9),
                        str(launches),
                        f"{launches * 1e-6 / _seconds(steps[0], -1):.0%}",
                        *(
                            " / ".join(
                                f"{batch / _seconds(each, place):,.0f}"
                                for batch, each in zip(BATCHES, steps, strict=True)
                            )
                            for place in range(len(DEVICES))
                        ),
                    ]


def _prefill() -> Iterator[list[str]]:
    for model in MODELS:
        costs = step(model, Setting(), Load(1, PROMPT, PROMPT))
        cells = [model.name]
        for place, device in enumerate(DEVICES):
            seconds = _seconds(costs, place)
            attention = sum(cost.seconds(device) for cost in costs if cost.name == "attention")
            cells += [
                f"{seconds * 1e3:,.0f} ms, {PROMPT / seconds:,.0f} tok/s",
                f"{attention / seconds:.0%}",
            ]
        yield cells


def _seconds(costs: list[Cost], device: int) -> float:
    return sum(cost.seconds(DEVICES[device]) for cost in costs)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |" for row in [head, *rows])
    return "\n".join([first, "|" + "-|" * len(head), *others])


def _update() -> None:
    """What is there under the heading becomes what is said here."""
    before, heading, after = _PAGE.read_text(encoding="utf-8").partition(_HEADING)
    following = after[after.index("\n## ") :]
    _PAGE.write_text(f"{before}{heading}{report()}{following}", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        _update()
    else:
        print(report(), end="")
