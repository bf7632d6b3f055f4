"""Patterns out of configurations: they mean what Python means by them, and none takes long."""

from __future__ import annotations

import re
import time

import pytest

from appliance.quant.patterns import MAX_PATTERN_CHARS, matches_start

NAMES = ("model.layers.1.mlp.up_proj", "model.layers.18.mlp.gate_proj", "lm_head", "", "model.layers.1_x")


@pytest.mark.parametrize(
    "pattern",
    [
        "model",
        r"layers",
        r".*\.18\..*gate.*",
        r".*\.(?:up|down)_proj$",
        r"^model\.layers\.\d+\.mlp",
        r"lm_head$|model\.layers\.1\.",
        r".*layers\.[0-9]\w",
        r"[\w.]+\b_?x$",
        r"[^\d]*1",
        r".*\\w",
        "",
    ],
)
def test_matching_is_pythons(pattern: str) -> None:
    assert [matches_start(pattern, name) for name in NAMES] == [
        bool(re.match(pattern, name)) for name in NAMES
    ]


@pytest.mark.parametrize(
    "pattern", ["(", "*x", r"(?!a)b", r"(a)\1", "a{3}", r"\pL", "a" * (MAX_PATTERN_CHARS + 1)]
)
def test_what_is_not_tried_is_not_known(pattern: str) -> None:
    assert matches_start(pattern, "aaa") is None


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*$", "(.*)*x", ".*" * 200 + "x", r"\w*" * 170 + "x", "(a?)+" * 100 + "x"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    start = time.perf_counter()
    assert matches_start(pattern, "a" * 100 + "b") is False
    assert time.perf_counter() - start < 5
