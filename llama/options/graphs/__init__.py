"""Steps of a fixed shape, recorded once as CUDA graphs and replayed."""
