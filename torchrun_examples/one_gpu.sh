#!/usr/bin/env bash
# One GPU, one process: Llama 3 8B Instruct (16 GB of weights in bf16, one shard).
# In: the folder of the weights. torchrun is not needed: `python SCRIPT` does the same.
set -euo pipefail
ckpt_dir=${1:?usage: $0 CKPT_DIR}
cd "$(dirname "$0")/.."
exec torchrun --nproc_per_node 1 scripts/chat_completion.py \
    --ckpt_dir "$ckpt_dir" --max_seq_len 512 --max_batch_size 6
