#!/usr/bin/env bash
# Two machines of eight GPUs: Llama 3.1 405B Instruct (810 GB of weights in bf16, 8 or 16 shards).
# Run the same line on both machines; each needs the whole folder at the same path. In: the folder,
# this machine's number (0 or 1), and the address of machine 0 as machine 1 reaches it.
set -euo pipefail
usage="usage: $0 CKPT_DIR MACHINE_NUMBER ADDRESS_OF_MACHINE_0"
ckpt_dir=${1:?$usage} node_rank=${2:?$usage} master_addr=${3:?$usage}
cd "$(dirname "$0")/.."
exec torchrun --nnodes 2 --nproc_per_node 8 --node_rank "$node_rank" \
    --master_addr "$master_addr" --master_port 29500 scripts/chat_completion.py \
    --ckpt_dir "$ckpt_dir" --max_seq_len 512 --max_batch_size 6
