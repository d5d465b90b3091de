"""GPU memory, checkpointed and restored with the processes that use it."""
