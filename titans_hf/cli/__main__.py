"""`python -m titans_hf.cli`: the `titans` command."""

from .app import main

main()
