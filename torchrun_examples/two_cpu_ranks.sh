#!/usr/bin/env bash
# Two ranks on the CPU, with the demo model in this repository: half of its one shard each.
# Arguments go to both scripts. --standalone picks a free port of this machine by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # or torchrun warns; ranks share the cores all the same
torchrun --standalone --nproc_per_node 2 scripts/text_completion.py --device cpu "$@"
torchrun --standalone --nproc_per_node 2 scripts/chat_completion.py --device cpu "$@"
