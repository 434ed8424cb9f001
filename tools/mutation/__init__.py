"""Whether the tests notice small faults: each is planted alone in a copy of the tree, where the named tests run."""
