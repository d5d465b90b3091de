"""LangGraph: a checkpointer and a memory that keep threads and items in a Holdfast store (docs/agents.md).

    from holdfast.integrations.langgraph import HoldfastSaver, HoldfastStore

    graph = builder.compile(checkpointer=HoldfastSaver("my-store"), store=HoldfastStore("my-store"))

A thread is a job, a subgraph's namespace a job beside it; a LangGraph checkpoint is a checkpoint of that job, the
writes of a task are a substep. A conversation that grows by a message stores that message and little else.
"""

from . import types
from .memories import HoldfastStore
from .saver import HoldfastSaver

types.register_all()

__all__ = ["HoldfastSaver", "HoldfastStore"]
