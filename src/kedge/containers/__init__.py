"""Containers and processes: checkpoints of them in a store, and restores."""
