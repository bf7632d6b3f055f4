"""Model folders as transformers saves them: safetensors shards beside a config.json."""
