"""What guides for vLLM show, with our import: it works under the same names, or is refused in one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import openai
import pytest
from live_daemon import BLOCK_BYTES, MODEL, command, environment, eventually

from appliance import LLM, SamplingParams
from appliance.settings import SettingsError

pytestmark = pytest.mark.starter


@pytest.fixture(scope="module")
def llm(starter_models_dir: Path) -> LLM:
    return LLM(
        model=MODEL,
        dtype="auto",
        max_model_len=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
        swap_space=0,
        enforce_eager=True,
        enable_prefix_caching=True,
        tensor_parallel_size=1,
        seed=0,
        download_dir=starter_models_dir,
    )


def test_offline_batch(llm: LLM) -> None:
    prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.outputs[0].text
        assert len(output.outputs[0].token_ids) <= 8


def test_a_shared_prefix_is_reused(llm: LLM) -> None:
    prefix = (
        "You are an expert on the geography of Europe. Answer in one word, and never explain yourself. " * 3
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    (cold,) = llm.generate(prefix + "What is the capital of France?", greedy)
    (warm,) = llm.generate(prefix + "What is the capital of Italy?", greedy)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens >= len(warm.prompt_token_ids) - 32


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"enable_lora": True}, "enable_lora"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_what_one_box_does_not_do_is_refused_in_one_line(setting: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refused:
        LLM(MODEL, **setting)
    assert "\n" not in str(refused.value)


def test_the_server_takes_the_flags_of_guides(starter_models_dir: Path, tmp_path: Path) -> None:
    flags = [
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "64",
        "--block-size",
        "32",
    ]
    flags += ["--gpu-memory-utilization", "0.5", "--swap-space", "0", "--enforce-eager", "--dtype", "auto"]
    flags += [
        "--served-model-name",
        "guide",
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        str(100 * BLOCK_BYTES),
    ]
    said = tmp_path / "stdout"
    with said.open("w") as out:
        child = subprocess.Popen(
            command("serve", MODEL, *flags),
            cwd=tmp_path,
            env=environment(starter_models_dir, tmp_path),
            stdout=out,
        )
    try:
        assert eventually(lambda: "base_url=" in said.read_text(), 60.0)
        base_url = said.read_text().split('base_url="')[1].split('"')[0]
        client = openai.OpenAI(base_url=base_url, api_key="EMPTY", max_retries=0)
        (model,) = client.models.list().data
        shown = model.model_dump()
        limits = {
            name: shown[name] for name in ("id", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        }
        assert limits == {
            "id": "guide",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
        }
        answer = client.completions.create(
            model="guide", prompt="San Francisco is a", max_tokens=7, temperature=0
        )
        assert answer.choices[0].text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 7
    finally:
        child.terminate()
        assert child.wait(30) == 0
