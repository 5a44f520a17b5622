"""Beside each attack of programs/attacks.py, small requests of others are answered, and rightly.

How soon they are is measured by that program, which runs each attack for longer.
"""

import asyncio

import pytest

from helpers.checkpoints import long_demo
from helpers.server import run_server
from programs import attacks


@pytest.mark.parametrize("source", [attacks.OTHER, attacks.ATTACKER], ids=["other", "same"])
def test_others_are_answered_beside_all_attacks(tmp_path, source):
    with run_server(str(long_demo(tmp_path / "demo")), *attacks.FLAGS) as server:
        names = [*attacks.ATTACKS]
        ran = attacks.run(server.url, server.process.pid, names, 0.7, source)
        assert asyncio.run(ran)
        assert server.stop() == 0, server.log[-20:]
