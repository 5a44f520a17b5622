"""`python -m llama`: hands over to the commands of `llama.cli`."""

import sys

from llama.cli import main

sys.exit(main())
