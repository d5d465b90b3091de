"""LangGraph: a checkpointer that keeps threads in a Holdfast store (docs/agents.md).

    from holdfast.integrations.langgraph import HoldfastSaver

    graph = builder.compile(checkpointer=HoldfastSaver("my-store"))

A thread is a job, a subgraph's namespace a job beside it; a LangGraph checkpoint is a checkpoint of that job, the
writes of a task are a substep. A conversation that grows by a message stores that message and little else.
"""

from . import types
from .saver import HoldfastSaver

types.register_all()

__all__ = ["HoldfastSaver"]
