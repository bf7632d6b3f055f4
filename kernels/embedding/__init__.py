"""Rows of an embedding by their numbers, quantised or dense, times a factor."""
