"""The HTTP server and the supervision of engine workers. Nothing here imports torch."""
