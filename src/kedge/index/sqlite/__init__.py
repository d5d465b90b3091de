"""The index in SQLite: the default, in a directory."""
