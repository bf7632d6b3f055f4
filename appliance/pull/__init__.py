"""Fetching models: one module per kind of source, `orchestrate` for those of the catalogue."""
