"""Entry point of `llama` and `python -m llama`, which runs the commands of `llama.cli`."""

import signal
import sys


def main() -> int:
    """Run the command line, and return the exit code.

    Ctrl-C during the imports ends the process silently; Python's handler would print a traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # the signal is not ignored, as it is under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llama.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
