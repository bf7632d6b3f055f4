"""A simulator of scheduling and KV memory: the real scheduler and pools, driven by random traffic, without torch."""
