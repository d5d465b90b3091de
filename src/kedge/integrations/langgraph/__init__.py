"""LangGraph: a checkpointer and a memory that keep threads and items in a Kedge store (docs/agents.md).

    from kedge.integrations.langgraph import KedgeSaver, KedgeStore

    graph = builder.compile(checkpointer=KedgeSaver("my-store"), store=KedgeStore("my-store"))

A thread is a job, a subgraph's namespace a job beside it; a LangGraph checkpoint is a checkpoint of that job, the
writes of a task are a substep. A conversation that grows by a message stores that message and little else.
"""

from kedge.errors import missing_extra

try:
    from . import types
    from .memories import KedgeStore
    from .saver import KedgeSaver
except ModuleNotFoundError as error:
    raise missing_extra("kedge.integrations.langgraph", "langgraph", error) from error

types.register_all()

__all__ = ["KedgeSaver", "KedgeStore"]
