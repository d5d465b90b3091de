"""Text for terminals: tables, trees, progress."""
