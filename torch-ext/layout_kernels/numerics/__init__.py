"""What proves an operation: its cases, made the same way for tests and benchmarks, and its tolerance."""
