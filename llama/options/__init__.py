"""Options that are added to the engine core: speculation, graphs, adapters, stages of a pipeline."""
