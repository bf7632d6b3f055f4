"""GGUF checkpoints. `file` and `metadata` import no torch; `blocks` and `checkpoint` do."""
