"""What stands in a model while a checkpoint is loaded: parameters under a kernel's names, and how they settle."""
