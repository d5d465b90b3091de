"""Servers that tests start for themselves, on 127.0.0.1 or a socket in a temporary directory."""
