"""`python -m kedge` is the command line."""

from .cli import main

main()
