"""The terminal dashboard, an HTTP client of the daemon."""
