"""GGUF checkpoints. `file`, `metadata` and `supported` import no torch."""
