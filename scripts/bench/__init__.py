"""The benchmark: how fast we are, beside other engines and beside what the machine can do."""
