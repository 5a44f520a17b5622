"""The operators of the model, one per file: tensors in, tensors out.

The PyTorch body of an operator is its definition; kernels compute the same.
"""
