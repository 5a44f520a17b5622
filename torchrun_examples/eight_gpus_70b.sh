#!/usr/bin/env bash
# Eight GPUs of one machine: Llama 3 70B Instruct (141 GB of weights in bf16, eight shards).
# In: the folder of the weights. Fewer GPUs work too where the memory is enough: --nproc_per_node 4
# or 2 loads the same eight shards.
set -euo pipefail
ckpt_dir=${1:?usage: $0 CKPT_DIR}
cd "$(dirname "$0")/.."
exec torchrun --nproc_per_node 8 scripts/chat_completion.py \
    --ckpt_dir "$ckpt_dir" --max_seq_len 512 --max_batch_size 6
