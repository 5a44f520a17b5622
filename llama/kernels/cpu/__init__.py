"""The CPU's kernels in C++, and the loader that compiles and calls them."""
