"""Objects that save themselves, and workflows with people in them."""
