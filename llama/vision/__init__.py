"""The parts of a model that read images: encoder, projector and cross-attention layers."""
