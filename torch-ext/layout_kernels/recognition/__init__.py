"""What is this module? Decided by what its class computes and what its parent's source says, never by names."""
