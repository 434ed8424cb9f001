"""Which versions of transformers, kernels and torch run our layers: tried, each in an environment of its own."""
