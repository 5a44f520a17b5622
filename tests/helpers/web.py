"""HTTP requests to servers on this machine, each over a connection of its own.

httpx.get and similar functions would read all certificates for each request.
"""

import httpx

web = httpx.Client(
    verify=False, trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
)
