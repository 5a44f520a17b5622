"""The pictures of the first page, made from real runs: a terminal, the server's page, bars."""
