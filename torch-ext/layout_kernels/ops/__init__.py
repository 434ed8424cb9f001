"""The operations: a folder for each, with its contract, its meaning (`reference`) and its implementations."""
