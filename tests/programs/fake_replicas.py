"""Supervises shell scripts in place of servers and HAProxy, for tests of the supervisor.

`python tests/programs/fake_replicas.py FOLDER SCRIPT SCRIPT` starts each script as a replica, and a
sleep as HAProxy. Its exit code is that of a command.
"""

import signal
import sys
from pathlib import Path

from llama.cli import ranks
from llama.cli.replicas.child import Child
from llama.cli.replicas.supervisor import Supervisor


def main() -> int:
    folder = Path(sys.argv[1])
    replicas = [
        Child(f"replica {i}", ["sh", "-c", script], signal.SIGTERM, {"FOLDER": str(folder)})
        for i, script in enumerate(sys.argv[2:])
    ]
    supervisor = Supervisor(
        replicas,
        Child("HAProxy", ["sleep", "300"], signal.SIGUSR1, is_ready=True),
        admin=folder / "admin.sock",
        drain_s=5,
        close_listener=lambda: ranks.say("closed"),
        on_ready=lambda: ranks.say("all are ready"),
    )
    return ranks.run(supervisor.run)


if __name__ == "__main__":
    sys.exit(main())
