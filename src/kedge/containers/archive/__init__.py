"""Container checkpoints as archives that other engines read and write."""
