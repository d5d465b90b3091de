"""The index in PostgreSQL, for many machines."""
