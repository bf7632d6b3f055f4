"""What the engine knows of a GPU: whether it can be used, and its memory."""
