"""One model shared by several processes: torchrun --nproc-per-node 2 examples/several_processes.py MODEL PROMPT."""

import sys

from torch import distributed

from selfspec import Engine

engine = Engine.from_pretrained(sys.argv[1], tp_plan="auto")
result = engine.generate(sys.argv[2], max_new_tokens=48)
if distributed.get_rank() == 0:
    sys.stdout.write(f"{result.text}\n{result.drafted} tokens drafted, {result.accepted} accepted\n")
distributed.destroy_process_group()
