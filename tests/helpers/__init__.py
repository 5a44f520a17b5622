"""What tests share: oracles, random checkpoints, prompts, and the launch of real processes."""
