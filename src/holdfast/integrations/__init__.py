"""Holdfast inside other frameworks. Each needs its extra: `pip install holdfast[langgraph]`."""
