"""HTTP to servers of this machine: httpx.get and its like would read all certificates each time.

Each request has a connection of its own, as theirs have.
"""

import httpx

web = httpx.Client(
    verify=False, trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
)
