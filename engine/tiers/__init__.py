"""The tiers of KV memory, and moving blocks between them."""
