"""Token ids in, token ids out: sequences, pages, scheduler, runner, sampling, and the one step."""
