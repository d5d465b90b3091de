"""Indexes: what exists."""
