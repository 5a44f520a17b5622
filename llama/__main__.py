"""`python -m llama`: hands over to the commands of `llama.cli`."""

from llama.cli import main

main()
