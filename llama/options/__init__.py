"""Options of the engine core: speculation, graphs, adapters, stages of a pipeline."""
