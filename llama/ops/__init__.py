"""One op a file: tensors in, tensors out, the plain torch body being the definition."""
