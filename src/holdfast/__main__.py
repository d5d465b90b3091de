"""`python -m holdfast` is the command line."""

from .cli import main

main()
