"""Containers: frozen, kept in a store, brought back."""
