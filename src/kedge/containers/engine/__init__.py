"""Container engines, and how they are asked."""
