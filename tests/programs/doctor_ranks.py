"""What test_doctor.py runs on every rank: `llama doctor DIR`, of which rank 1 is unlike rank 0."""

import os
import sys

import llama
from llama.cli import main

if os.environ["RANK"] == "1":
    llama.__version__ = "0.0.7"
    os.environ["OMP_NUM_THREADS"] = "99"  # torch has read it already
sys.exit(main(["doctor", sys.argv[1], "--device", "cpu"]))
