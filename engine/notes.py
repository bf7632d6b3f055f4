"""What is not as the settings asked for: sentences for the log. Imports no torch."""

from __future__ import annotations

from appliance.engine.config import EngineConfig


def load_notes(config: EngineConfig, own: tuple[str, ...], tensor_types: tuple[str, ...]) -> tuple[str, ...]:
    """One sentence for each wish that a loaded model does not fulfil.

    Args:
        own: what those have to say who plan the memory and run the steps, "" for nothing.
        tensor_types: the file's, the one that most bytes are of first.
    """
    swap = ""
    if config.swap_space > 0:
        swap = (
            f"swap_space asks for {config.swap_space:g} GiB, but KV memory has one tier: "
            "preempted requests are computed again"
        )
    notes = (*own, swap, _quantization_note(config, tensor_types))
    return tuple(note for note in notes if note)


def _quantization_note(config: EngineConfig, tensor_types: tuple[str, ...]) -> str:
    wish = (config.quantization or "").lower()
    container = "GGUF " if config.model_path.endswith(".gguf") else ""
    own = {container.strip().lower(), *(name.lower() for name in tensor_types)}
    own |= {name.partition("-")[0] for name in own}
    if wish in own or not wish:
        return ""
    return f"quantization asks for {wish}, but the tensors are {container}{', '.join(tensor_types)}: the tensors decide"
