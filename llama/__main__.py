"""`llama` and `python -m llama`: hands over to the commands of `llama.cli`."""

import signal
import sys


def main() -> int:
    """The exit code. Ctrl-C during the imports ends the process as it ends a program in C: in
    silence, where Python's own handler would print the place that it came to."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llama.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
