"""transformers' own command line, with Titans known to it: `python -m titans_hf serve runs/demo`, then `chat`."""

from transformers.cli.transformers import main

main()
