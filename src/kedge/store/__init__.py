"""The store: how a state becomes a durable checkpoint, and comes back verified."""
