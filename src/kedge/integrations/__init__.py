"""Kedge inside other frameworks. Each needs its extra: `pip install '.[langgraph]' in a clone`."""
