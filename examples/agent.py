"""An agent that asks before it publishes, survives kill -9, and can go back in time. Runs offline, with a fake model.

python agent.py ask                   research, draft, then wait for approval
python agent.py ask --kill-in draft   die in the middle; run `ask` again and it continues
python agent.py approve yes           publish what waits
python agent.py history               every checkpoint of the thread
python agent.py redo                  back to before the draft: write another one, as a branch
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from kedge.integrations.langgraph import KedgeSaver

CONFIG: Any = {"configurable": {"thread_id": "report"}}


class State(MessagesState, total=False):
    facts: list[str]
    drafts: int
    published: str


def build(kill_in: str | None = None) -> StateGraph[State]:
    def research(state: State) -> Any:
        print("research …")
        return {"facts": ["threads are jobs", "every message is stored once"]}

    def draft(state: State) -> Any:
        if kill_in == "draft":
            os.kill(os.getpid(), signal.SIGKILL)
        number = state.get("drafts", 0) + 1
        model = GenericFakeChatModel(messages=iter([AIMessage(f"draft {number}: {', '.join(state['facts'])}")]))
        answer = model.invoke(state["messages"])
        print(answer.content)
        return {"messages": [answer], "drafts": number}

    def approve(state: State) -> Any:
        is_approved = interrupt(f"publish {state['messages'][-1].content!r}?")
        return Command(goto="publish" if is_approved else END)

    def publish(state: State) -> Any:
        print("published")
        return {"published": state["messages"][-1].content}

    builder = StateGraph(State)
    builder.add_node("research", research)
    builder.add_node("draft", draft)
    builder.add_node("approve", approve, destinations=("publish", END))
    builder.add_node("publish", publish)
    builder.add_edge(START, "research")
    builder.add_edge("research", "draft")
    builder.add_edge("draft", "approve")
    return builder


def run(graph: Any, what: Any, config: Any = CONFIG) -> None:
    result = graph.invoke(what, config, durability="sync")
    if "__interrupt__" in result:
        print("waiting for approval:", result["__interrupt__"][0].value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["ask", "approve", "history", "redo"])
    parser.add_argument("answer", nargs="?", default="no")
    parser.add_argument("--store", default="agent-store")
    parser.add_argument("--kill-in", choices=["draft"])
    chosen = parser.parse_args()
    with KedgeSaver(chosen.store) as saver:
        graph = build(chosen.kill_in).compile(checkpointer=saver)
        if chosen.command == "ask":
            waiting = graph.get_state(CONFIG).next
            if waiting:
                print("resuming at", *waiting)
            run(graph, None if waiting else {"messages": [HumanMessage("Write the report.")]})
        elif chosen.command == "approve":
            run(graph, Command(resume=chosen.answer == "yes"))
        elif chosen.command == "history":
            for checkpoint in saver.checkpoints(CONFIG):
                print(f"{checkpoint.seq:4}  {checkpoint.step:10}  {checkpoint.stored_bytes:6,} B  {checkpoint.id}")
        else:
            before = next(state for state in graph.get_state_history(CONFIG) if state.next == ("draft",))
            run(graph, None, graph.update_state(before.config, {"drafts": 1}))


if __name__ == "__main__":
    main()
