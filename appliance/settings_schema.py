"""The schema of all settings: name, type, default, range, unit and what each one does.

The command line's help, `docs/configuration.md` and `docs/config.toml` are made from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import platformdirs
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from appliance.engine.config import EngineConfig
from appliance.engine.sampling_params import MAX_SEED
from appliance.settings_values import BlockSize, Device, Texts, parse_host, parse_origin

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
KEYS_FILE = "api_keys"
# What fits into the messages between daemon and worker.
MAX_BYTES = 2**63 - 1
MAX_TOKENS = 2**31 - 1
_KEY = re.compile(r"[!-~]+")


class SettingsError(Exception):
    """A setting is unknown, out of range or not supported; the message names it and where it was set."""


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    absent: str = "",
    shown: str = "",
    example: str | float = "",
    why: str = "",
    secret: bool = False,
    **limits: Any,
) -> Any:
    """A field of the schema.

    Args:
        unit: what a number counts.
        absent: what happens where the setting is not given and has no default value.
        shown: the default as documented, where the real one depends on the machine.
        example: a value for the sample file, where there is no default value.
        why: the reason why no other choice works, and what to do instead.
        secret: never printed.
        limits: `ge`, `gt`, `le`, `lt` as pydantic has them.
    """
    extra: dict[str, Any] = {
        "unit": unit,
        "absent": absent,
        "shown": shown,
        "example": example,
        "why": why,
        "secret": secret,
    }
    return Field(default=default, description=description, json_schema_extra=extra, repr=not secret, **limits)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSettings(_Section):
    """What is served, and how it is computed."""

    model: str = setting(
        "smollm2:135m",
        "The model to serve: a name of the catalogue, or a path to a .gguf file or a model folder.",
    )
    served_model_name: str | None = setting(
        None, "What clients call the model.", absent="the model's own name", example="house-model"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "What the model is computed in: bfloat16 or float16 on a GPU, where auto is float16 for checkpoints that say "
        "they are; float32 on the CPU, where what the inputs of matrix products are rounded to is "
        "activation_precision. What doesn't go with the backend is refused.",
        why="what keys and values are kept in is kv_cache_dtype",
    )
    quantization: str | None = setting(
        None,
        "How you expect the weights to be quantised, e.g. gguf or q4_0. The tensors decide: where they are "
        "something else, that is said at start.",
        absent="whatever the tensors are",
        example="gguf",
    )
    device: Device = setting(
        "auto",
        "Where the model is computed: cpu, cuda, or of several GPUs cuda:0, cuda:1 and so on, as "
        "CUDA_VISIBLE_DEVICES numbers them. auto is the first GPU where one can be used, else cpu.",
    )
    backend: Literal["auto", "cpu", "gpu", "reference"] = setting(
        "auto",
        "Who computes: gpu is kernels for NVIDIA GPUs of compute capability 8.0 (Ampere) or later, cpu is the native "
        "kernels; both refuse to start where they cannot run. reference is plain torch, exact and many times slower. "
        "auto is the first of these three that can run.",
        why="leave backend at auto",
    )
    activation_precision: Literal["int8", "bf16", "float32"] = setting(
        "int8",
        "What the native kernels round the inputs of matrix products to. int8, with a scale for every 32 values, is "
        "the fastest and changes a few greedy tokens in a hundred of a small model; bf16 changes about three in a "
        "thousand, and is two to three times slower; float32 rounds nothing "
        "and is the slowest. The reference always takes float32, a GPU what dtype says.",
        why="bf16 rounds less than int8, float32 rounds nothing",
    )
    tensor_parallel_size: int = setting(
        1,
        "Devices that share one model.",
        ge=1,
        le=1,
        why="a model is computed by one device; leave tensor_parallel_size at 1, and take a smaller or more "
        "strongly quantised model if this one doesn't fit",
    )
    num_threads: int | None = setting(
        None,
        "CPU threads of a step.",
        unit="threads",
        absent="as many as the cores that the process may use, by its affinity and the CPU quota of its control group",
        example=4,
        ge=1,
        le=1024,
    )
    enforce_eager: bool = setting(
        False,
        "Never capture steps as device graphs. The CPU backend captures nothing, so both are the same there.",
    )
    seed: int | None = setting(
        None,
        "Requests without a seed of their own get one derived from this, so that a run can be repeated: the same "
        "requests in the same order give the same answers.",
        absent="such requests get a random seed",
        example=42,
        ge=0,
        le=MAX_SEED,
    )


class MemorySettings(_Section):
    """Contexts, batches and KV memory."""

    max_model_len: int | None = setting(
        None,
        "Longest context to serve, prompt and answer together. Never more is served than the model was made for or "
        "the KV memory holds.",
        unit="tokens",
        absent="the model's own",
        example=4096,
        ge=16,
        le=MAX_TOKENS,
    )
    max_num_seqs: int = setting(64, "Most requests in one step; others wait.", unit="requests", ge=1, le=1024)
    max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens computed in one step: long prompts are computed in chunks of that many. At least "
        "max_num_seqs, so that every request can have one.",
        unit="tokens",
        ge=16,
        le=65536,
        absent="128 on the CPU, 2048 on a GPU",
        example=512,
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Size of the KV memory.",
        unit="bytes",
        absent="planned from the memory that is free",
        example=2**31,
        ge=1,
        le=MAX_BYTES,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Most that the KV memory may take of what is free once the weights are loaded: of the GPU's memory, or of "
        "main memory. Not asked where kv_cache_memory_bytes is given.",
        unit="of what is free",
        absent="nine tenths of a GPU's, leaving at least 512 MiB; a quarter of main memory, and at most 4 GiB",
        example=0.5,
        gt=0,
        le=0.95,
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = setting(
        "auto",
        "What keys and values are kept in; auto is what dtype says on a GPU, bfloat16 with the native kernels and "
        "float32 with the reference. The 16-bit types take half the memory of float32, int8 about a quarter. The "
        "native kernels have no float16, a GPU no float32, the reference no int8.",
        why="int8 is the smallest that is kept",
    )
    block_size: BlockSize = setting(
        16,
        "Tokens in a block of KV memory, the unit in which it is shared and given back.",
        unit="tokens",
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV memory of prompts that begin alike.")
    swap_space: float = setting(
        0.0,
        "Further memory for the KV blocks of requests that must wait. No backend swaps: such requests are computed "
        "again, and a start with swap_space says so.",
        unit="GiB",
        ge=0,
        le=4096,
    )


class ServerSettings(_Section):
    """Where the daemon listens, and for how long it waits."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; one that other machines can reach needs an API key."
    )
    port: int = setting(8000, "Port to listen on, also for /metrics; 0 takes a free one.", ge=0, le=65535)
    request_timeout: float = setting(
        600.0, "After this long a request is ended with an error.", unit="seconds", gt=0
    )
    drain_timeout: float = setting(
        30.0,
        "How long running requests get to finish when the daemon is told to stop.",
        unit="seconds",
        ge=0,
    )
    max_body_bytes: int = setting(8 * 2**20, "Largest request body.", unit="bytes", ge=1024)


class AccessSettings(_Section):
    """Who may ask."""

    api_key: Texts = setting(
        (),
        "Keys that clients may send. Better set as APPLIANCE_API_KEY (several between commas), which `ps` doesn't "
        "show, or kept hashed in api_keys_file.",
        absent="no key is needed, unless api_keys_file has some",
        secret=True,
    )
    api_keys_file: Path | None = setting(
        None,
        "File with the hashes of further keys, managed by `appliance key`. It is read again when it changes.",
        absent="the file api_keys in config_dir, where there is one",
        example="~/.config/appliance/api_keys",
    )
    ssl_certfile: Path | None = setting(
        None,
        "Certificate chain (PEM) for HTTPS; needs ssl_keyfile.",
        absent="plain HTTP",
        example="~/.config/appliance/cert.pem",
    )
    ssl_keyfile: Path | None = setting(
        None,
        "Private key (PEM, without a passphrase) of ssl_certfile.",
        absent="plain HTTP",
        example="~/.config/appliance/key.pem",
    )
    allowed_hosts: Texts = setting(
        (),
        "Further names under which clients may reach the daemon, e.g. host.docker.internal.",
        absent="localhost, loopback addresses and host",
    )
    allowed_origins: Texts = setting(
        (),
        "Web pages that may read answers (CORS), e.g. https://chat.lan or http://localhost:3000; * for all, which "
        "needs an API key.",
        absent="no web page",
    )


class PlaceSettings(_Section):
    """Where things are kept."""

    download_dir: Path = setting(
        Path(platformdirs.user_data_dir("appliance")) / "models",
        "Folder that holds the models.",
        shown="~/.local/share/appliance/models",
    )
    config_dir: Path = setting(
        Path(platformdirs.user_config_dir("appliance")),
        "Folder that holds config.toml, models.toml and api_keys; not to be set in config.toml itself.",
        shown="~/.config/appliance",
    )


SECTIONS: tuple[type[BaseModel], ...] = (
    ModelSettings,
    MemorySettings,
    ServerSettings,
    AccessSettings,
    PlaceSettings,
)


class Settings(PlaceSettings, AccessSettings, ServerSettings, MemorySettings, ModelSettings):
    """Every setting of the daemon and of the offline API, with its default and range."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, values: Any) -> Any:
        """An empty text takes a setting back that a file or the environment made."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value != ""}

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_true(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("Input should not be true or false, which only switches take")
        return value

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        return parse_host(host)

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(parse_host, hosts))

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_KEY.fullmatch(key) for key in keys):
            raise ValueError("a key must be of visible ASCII characters without spaces, to fit into a header")
        return keys

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(parse_origin, origins))

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Settings:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, lacking = ("ssl_certfile", "ssl_keyfile")[:: 1 if self.ssl_certfile else -1]
            raise ValueError(f"{given} is set but {lacking} is not; HTTPS needs both, plain HTTP neither")
        return self

    @field_validator("download_dir", "config_dir", "api_keys_file", "ssl_certfile", "ssl_keyfile")
    @classmethod
    def _at_home(cls, path: Path | None) -> Path | None:
        try:
            return path and path.expanduser()
        except RuntimeError as error:
            raise ValueError(f"no home folder is known: {error}") from None

    @property
    def keys_file(self) -> Path:
        """The file of hashed keys, whether it is there or not."""
        return self.api_keys_file or self.config_dir / KEYS_FILE

    def url(self, port: int | None = None) -> str:
        """Where programs on this machine reach the daemon, on `port` where the setting leaves that open."""
        scheme = "https" if self.ssl_certfile else "http"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or self.port}"

    def engine_config(self, model_path: Path) -> EngineConfig:
        """The settings that an engine for this model file is started with."""
        names = set(EngineConfig.__struct_fields__) - {"model_path"}
        return EngineConfig(model_path=str(model_path), **self.model_dump(include=names))
