"""Rows of a quantised matrix by their numbers; of a dense one, torch's own `embedding` does as well."""
