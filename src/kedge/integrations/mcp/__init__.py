"""`kedge mcp`: checkpoints for agents, by the Model Context Protocol over stdin and stdout.

protocol.py  messages: JSON-RPC 2.0, one to a line
tools.py     what an agent can do: save, list, show, diff, restore, fork; nothing outside of its prefix

The protocol needs no library: an agent's own checkpoints work wherever Kedge is installed.
"""
